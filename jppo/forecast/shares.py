"""Shares of the vendors' rates that kernels and links reach, by generation of devices, each with its source.

Each is a published measurement of one kernel alone, or an assumption that says so. Only `program`, the loss of all
kernels in a whole training step, is from one published run on GPUs and one on TPUs (docs/machines.md).
"""

import dataclasses
from typing import Literal

Kind = Literal["product", "attention", "memory", "link", "network", "program"]


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of a vendor's rate."""

    value: float
    source: str


_MAMF = "of cuBLAS at its best shape, ml-engineering's table of achievable matmul FLOP/s"
_STREAM = Share(0.85, "assumed: long streams; copies of 32 MiB reach 83 % on v6e")
_ICI = Share(0.8, "assumed: large messages of ICI")
_DCN = Share(0.7, "assumed: as between hosts of GPUs")
_MXU = Share(0.9, "827 of 918 TFLOP/s, bfloat16, 8192 x 8192 x 8192 on v6e, Google's tpu-recipes, microbenchmarks")
_ATTENTION = "assumed: splash attention, heads of 128"
_HOSTS = Share(0.73, "36.5 of 50 GB/s a GPU, all-reduce of four hosts of B200, ml-engineering, network")

_STEP = Share(0.75, "of a whole step: MaxText's Llama2-7B on 8 H100, 492 TFLOP/s a GPU")
_TPU_STEP = Share(0.85, "of a whole step: MaxText's Llama3.1-8B on v6e-8, 413 TFLOP/s a chip")

_TPU: dict[Kind, Share] = {"program": _TPU_STEP, "product": _MXU, "memory": _STREAM, "link": _ICI, "network": _DCN}
SHARES: dict[str, dict[Kind, Share]] = {
    "hopper": {
        "product": Share(0.80, f"794.5 of 989 TFLOP/s {_MAMF}"),
        "attention": Share(
            0.53, "cuDNN at 4,096 tokens and heads of 128: 609 TFLOP/s forward, 499 backward, arXiv:2407.08608"
        ),
        "memory": _STREAM,
        "link": Share(0.80, "361 of 450 GB/s, NCCL's all-gather on 8 H200, ml-engineering, network"),
        "network": _HOSTS,
        "program": _STEP,
    },
    "blackwell": {
        "product": Share(0.78, f"1,745 of 2,250 TFLOP/s {_MAMF}"),
        "attention": Share(0.5, "assumed: as on Hopper"),
        "memory": _STREAM,
        "link": Share(0.82, "741 of 900 GB/s, NCCL's all-reduce of 4 GiB on 8 B200, ml-engineering, network"),
        "network": _HOSTS,
        "program": _STEP,
    },
    "ampere": {
        "product": Share(0.87, f"271 of 312 TFLOP/s {_MAMF}"),
        "attention": Share(0.5, "50 to 73 % of an A100, FlashAttention-2, arXiv:2307.08691; the lower end"),
        "memory": _STREAM,
        "link": Share(0.78, "235 of 300 GB/s, NCCL's all-reduce on 8 A100, ml-engineering, network"),
        "network": _HOSTS,
        "program": _STEP,
    },
    "ada": {
        "product": Share(0.8, "assumed: as on Hopper"),
        "attention": Share(0.5, "assumed: as on Ampere"),
        "memory": _STREAM,
        "link": Share(0.8, "assumed: large messages by PCIe"),
        "network": _HOSTS,
        "program": _STEP,
    },
    # Heads of 128 fill a matrix unit of 128 x 128, and half of one of 256 x 256.
    "tpu128": _TPU | {"attention": Share(0.6, f"{_ATTENTION}, which fill the matrix unit")},
    "tpu256": _TPU | {"attention": Share(0.45, f"{_ATTENTION}, which fill half of the matrix unit of v6e")},
}
