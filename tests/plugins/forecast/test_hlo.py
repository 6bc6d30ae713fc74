"""What is read from XLA's text: against numbers worked by hand, of kept snippets and of programs compiled here."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jppo.plugins.forecast import account, hlo, program_costs, schedule
from jppo.preflight.programs import compile_program

SIZES = {"data": 2, "fsdp": 2, "sequence": 1, "tensor": 2}


def module(entry, *others):
    """HLO text of an entry's lines and other computations."""
    lines = "\n".join(f"  {line}" for line in entry)
    return "HloModule m\n\n" + "\n\n".join(others) + f"\n\nENTRY %main (p: f32[]) -> f32[] {{\n{lines}\n}}\n"


def body(name, *lines):
    return f"%{name} (p: f32[]) -> f32[] {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}"


GATHER = (
    "%g = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1),"
    ' dimensions={0}, metadata={op_name="jit(f)/while/dot"}'
)


def test_loops_multiply_and_an_async_pair_counts_once():
    inner = body("inner", "%x = bf16[4,8]{1,0} parameter(0)", GATHER, "%d = bf16[8,8]{1,0} all-gather-done(%g)")
    outer = body(
        "outer",
        "%t = (s32[]) parameter(0)",
        '%w = (s32[]) while(%t), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}',
    )
    text = module(
        [
            "%t = (s32[]) parameter(0)",
            '%v = (s32[]) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}',
        ],
        inner,
        outer,
    )
    (one,) = schedule.find_collectives(hlo.parse_hlo(text), SIZES)
    assert (one.kind, one.times, one.bytes, one.total, one.in_loop) == ("all-gather", 15, 8 * 8 * 2, 15 * 128, True)
    assert one.axes == ("fsdp",) and one.source == "jit(f)/while/dot"


@pytest.mark.parametrize(
    "condition, expected",
    [
        (["%n = s32[] constant(7)", "ROOT %l = pred[] compare(%i, %n), direction=LT"], 7),
        (["%n = s32[] constant(7)", "ROOT %l = pred[] compare(%i, %n), direction=GT"], None),
        (["ROOT %l = pred[] compare(%i, %j), direction=LT"], None),
    ],
)
def test_the_trip_count_of_a_tpus_loop_is_its_conditions(condition, expected):
    text = module(["%w = (s32[]) while(%t), condition=%c, body=%b"], body("c", *condition), body("b"))
    program = hlo.parse_hlo(text)
    assert program.trips(program.computations["main"]["w"]) == expected
    assert program.unknown_loops() == ([] if expected else ["w"])


def test_a_loop_over_the_tokens_of_a_mask_runs_their_share():
    inner = body(
        "b",
        "%order = s32[9,64]{1,0} parameter(0)",
        "%part = s32[1]{0} dynamic-slice(%row, %i), dynamic_slice_sizes={1}",
        "%row = s32[64]{0} parameter(1)",
        "%one = s32[1,64]{1,0} dynamic-slice(%order, %i, %z), dynamic_slice_sizes={1,64}",
    )
    text = module(["%w = (s32[]) while(%t), condition=%c, body=%b"], body("c", "%x = pred[] parameter(0)"), inner)
    for share, trips in ((1.0, 9), (0.5, 5), (1 / 3, 3)):
        program = hlo.parse_hlo(text, share)
        assert program.trips(program.computations["main"]["w"]) == trips


@pytest.mark.parametrize(
    "spelling, axes, first",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",), (0, 1)),
        ("replica_groups=[4,2]<=[8]", ("tensor",), (0, 1)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor"), (0, 1, 4, 5)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), (0, 2)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), (0, 2, 4, 6)),
        ("replica_groups={}", ("data", "fsdp", "tensor"), tuple(range(8))),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("data", "fsdp"), (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'b'}", ("data", "tensor"), (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ("fsdp",), (0, 2)),
    ],
)
def test_groups_of_devices_in_every_spelling(spelling, axes, first):
    text = module(["%x = f32[4]{0} parameter(0)", f"%r = f32[4]{{0}} all-reduce(%x), {spelling}, to_apply=%add"])
    (one,) = schedule.find_collectives(hlo.parse_hlo(text), SIZES)
    assert one.axes == axes and one.groups[0] == first
    assert sorted(n for group in one.groups for n in group) == list(range(8))


def test_a_group_of_one_device_sends_nothing_and_a_permute_to_itself_neither():
    text = module(
        [
            "%x = f32[4]{0} parameter(0)",
            "%r = f32[4]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
            "%p = f32[4]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
            "%q = f32[4]{0} collective-permute(%x), source_target_pairs={{0,0},{1,3}}",
        ]
    )
    (one,) = schedule.find_collectives(hlo.parse_hlo(text), SIZES)
    assert (one.kind, one.groups, one.axes, one.bytes) == ("collective-permute", ((1, 3),), ("fsdp",), 16)


def test_what_is_reduced_counts_as_before_and_what_is_gathered_as_after():
    text = module(
        [
            "%x = f32[8,4]{1,0} parameter(0)",
            "%s = f32[4,4]{1,0} reduce-scatter(%x), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add",
            "%g = ((f32[8,4], f32[2]), (f32[16,4], f32[4])) all-gather-start(%x, %y), replica_groups=[4,2]<=[8]",
        ]
    )
    assert {one.kind: one.bytes for one in schedule.find_collectives(hlo.parse_hlo(text), SIZES)} == {
        "reduce-scatter": 8 * 4 * 4,
        "all-gather": 16 * 4 * 4 + 4 * 4,
    }


CUDNN = (
    '%a = (bf16[2,4,128,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax",'
    ' backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16",'
    ' "dimensions": ["2", "4", "128", "128"]}, "mask_type": "CAUSAL"}}'
)
SPLASH = (
    "%splash_mha_fwd_segmented_residuals.3 = (f32[2,512]{1,0}, bf16[2,4,128,64]{3,2,1,0}) custom-call(%m, %q2, %k2),"
    ' custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/mha/pallas_call"}'
)

SPLASH_OF_ONE_ROW = (
    "%splash_mha_fwd_segmented_residuals.3 = (f32[2,512]{1,0}, bf16[8,128,64]{2,1,0}) custom-call(%m, %q3, %k3),"
    ' custom_call_target="tpu_custom_call"'
)

TRITON = (
    "%pallas_call.12 = (bf16[2,128,4,64]{3,2,1,0}, f32[2,4,128]{2,1,0}) custom-call(%q, %k, %k),"
    ' custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/jvp(jit(mha))/mha_forward/pallas_call"}'
)


SPLASH_DQ = (
    "%splash_mha_dq_segmented.2 = (bf16[2,4,128,64]{3,2,1,0}) custom-call(%m, %q2, %k2, %k2),"
    ' custom_call_target="tpu_custom_call"'
)

TRITON_BACKWARD = (
    "%pallas_call.13 = (bf16[2,128,4,64]{3,2,1,0}, bf16[2,128,4,64]{3,2,1,0}, bf16[2,128,4,64]{3,2,1,0})"
    ' custom-call(%q, %k, %k), custom_call_target="__gpu$xla.gpu.triton",'
    ' metadata={op_name="jit(f)/transpose(jvp(jit(mha)))/mha_backward/pallas_call"}'
)


@pytest.mark.parametrize(
    "line, kernel, products",
    [
        (TRITON, "mha_forward", 2),
        # scores and their gradient are computed twice: by the loop for keys and values, and by that for queries
        (TRITON_BACKWARD, "mha_backward", 2 * 2 + 2 + 1),
        (CUDNN, "__cudnn$fmhaSoftmax", 2),
        (SPLASH, "splash_mha_fwd_segmented_residuals", 2),
        (SPLASH_OF_ONE_ROW, "splash_mha_fwd_segmented_residuals", 2),
        (SPLASH_DQ, "splash_mha_dq_segmented", 2 + 1),
    ],
)
def test_attention_kernels_by_name_and_with_their_products(line, kernel, products):
    operands = [
        "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
        "%k = bf16[2,128,2,64]{3,2,1,0} parameter(1)",
        "%v = bf16[2,128,2,64]{3,2,1,0} parameter(2)",
        "%m = s8[1,2,2]{2,1,0} parameter(3)",
        "%q2 = bf16[2,4,128,64]{3,2,1,0} parameter(4)",
        "%k2 = bf16[2,2,128,64]{3,2,1,0} parameter(5)",
        "%q3 = bf16[8,128,64]{2,1,0} parameter(6)",
        "%k3 = bf16[2,128,64]{2,1,0} parameter(7)",
    ]
    program = hlo.parse_hlo(module([*operands, line]))
    assert program_costs.kernels(program) == {kernel: 1}
    # 2 rows, 4 heads, 128 x 128 pairs of which half are seen, 64 wide, products of a multiplication and an addition
    assert program_costs.flops(program) == {"bfloat16": 2 * 4 * 128 * 128 // 2 * 64 * products * 2}


@pytest.mark.parametrize("queries, products", [("", 4), ("bf16[4,128,64]{2,1,0}, ", 5)])
def test_a_backward_kernel_that_has_the_gradient_of_queries_has_a_product_more(queries, products):
    results = f"f32[1024,128]{{1,0}}, {queries}bf16[4,128,64]{{2,1,0}}, bf16[4,128,64]{{2,1,0}}"
    line = f'%splash_mha_dkv.1 = ({results}) custom-call(%m, %q, %q, %q), custom_call_target="tpu_custom_call"'
    program = hlo.parse_hlo(
        module(["%m = s8[1,2,2]{2,1,0} parameter(0)", "%q = bf16[4,128,64]{2,1,0} parameter(1)", line])
    )
    assert program_costs.flops(program) == {"bfloat16": products * 4 * 128 * 128 * 64}


@pytest.mark.parametrize(
    "line, outputs, pairs",
    [
        ("window={size=1}, dim_labels=bf0_oi0->bf0", 8, 8 * 1),
        # a batched product as a TPU writes it: of all positions of the window one meets the input
        ("window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf", 8, 8),
        ("window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=0bf_0io->0bf", 9, 16),
        ("window={size=2 stride=2 pad=1_0}, dim_labels=0bf_0io->0bf", 4, 7),  # the first has one of its two
        ("window={size=2 stride=2 pad=1_0}, dim_labels=b0f_io0->0fb", 4, 7),
    ],
)
def test_a_convolution_counts_the_positions_that_meet_its_input(line, outputs, pairs):
    size = int(line.split("size=")[1][0])
    sizes = ({"b": 4, "f": 16, "0": 8}, {"i": 16, "o": 32, "0": size}, {"b": 4, "f": 32, "0": outputs})
    labels = line.split("dim_labels=")[1].replace("->", "_").split("_")
    spatial, kernel, out = (",".join(str(of[x]) for x in each) for each, of in zip(labels, sizes, strict=True))
    text = module(
        [
            f"%x = bf16[{spatial}]{{2,1,0}} parameter(0)",
            f"%w = bf16[{kernel}]{{2,1,0}} parameter(1)",
            f"%c = bf16[{out}]{{2,1,0}} convolution(%x, %w), {line}",
        ]
    )
    assert program_costs.flops(hlo.parse_hlo(text)) == {"bfloat16": 2 * 4 * 32 * 16 * pairs}


def test_a_slice_of_what_is_stacked_is_read_and_not_all_of_it():
    sliced = body(
        "sliced",
        "%a = f32[28,4,4]{2,1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%s = f32[1,4,4]{2,1,0} dynamic-slice(%a, %i, %z, %z), dynamic_slice_sizes={1,4,4}",
        "ROOT %n = f32[1,4,4]{2,1,0} negate(%s)",
    )
    updated = body(
        "updated",
        "%a = f32[28,4,4]{2,1,0} parameter(0)",
        "%b = f32[1,4,4]{2,1,0} parameter(1)",
        "ROOT %u = f32[28,4,4]{2,1,0} dynamic-update-slice(%a, %b, %i, %z, %z)",
    )
    text = module(
        [
            "%a = f32[28,4,4]{2,1,0} parameter(0)",
            "%i = s32[] parameter(1)",
            "%f = f32[1,4,4]{2,1,0} fusion(%a, %i), kind=kLoop, calls=%sliced",
            "%g = f32[28,4,4]{2,1,0} fusion(%a, %f), kind=kLoop, calls=%updated",
            "%v = f32[4,4]{1,0:S(1)} copy(%w)",
        ],
        sliced,
        updated,
    )
    program = hlo.parse_hlo(text)
    found = {one.name: program_costs.bytes_moved(program, name, one) for name, one, _ in program.executed()}
    entry = 4 * 4 * 4
    assert found["f"] == 2 * entry + 4  # and the index
    assert found["g"] == 2 * entry  # the new part read, and written in place
    assert found["v"] == 0  # to a TPU's vector memory


def test_the_account_of_a_program_compiled_here():
    """Two layers on eight devices: products, gathers along an axis and their number follow from the shapes."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    L, R, D, F = 3, 16, 64, 128

    def shape(dims, *spec):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def run(x, up, down):
        def layer(x, w):
            whole = [jax.lax.with_sharding_constraint(one, NamedSharding(mesh, P())) for one in w]
            return x + jnp.tanh(x @ whole[0]) @ whole[1], None

        return jax.lax.scan(layer, x, (up, down))[0]

    args = shape((R, D), ("data", "fsdp")), shape((L, D, F), None, "fsdp"), shape((L, F, D), None, "fsdp")
    compiled = compile_program(jax.jit(run).lower(*args), dict(mesh.shape), inspect=account.inspect)
    found = compiled.work
    assert compiled.error is None and found.unknown_loops == ()
    assert found.total_flops == L * 2 * 2 * (R // 8) * D * F
    gathers = [row for row in schedule.totals(found.collectives) if row[0] == "all-gather"]
    assert [row[1] for row in gathers] == [("fsdp",)]
    assert gathers[0][3] == 2 * L * D * F * 4  # each layer's two matrices, once
    weights = 2 * L * D * F // 4 * 4
    assert compiled.arguments == weights + R // 8 * D * 4
    assert found.hbm > 2 * L * D * F * 4  # at least all gathered weights are read


def test_a_program_that_the_compiler_refuses_has_its_reason():
    class Refusing:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 17G\nof 15.75G\n\nmore")

    assert compile_program(Refusing(), {}).error == "RESOURCE_EXHAUSTED: Used 17G of 15.75G"


def test_partitioner_warnings_are_kept_and_the_rest_is_written(capfd):
    import os

    line = (
        "W1 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go ... for HLO"
        ' operation %gather.7 = f32[64,8]{1,0} gather(%a), metadata={op_name="jit(f)/embed/gather"}. As the last'
    )

    class Warning_:
        def compile(self):
            os.write(2, f"{line}\nanother line\n".encode())
            return jax.jit(lambda x: x + 1).lower(1.0).compile()

    found = compile_program(Warning_(), {}, inspect=account.inspect).work
    assert found.warnings == ("gather f32[64,8] (jit(f)/embed/gather)",)
    assert capfd.readouterr().err.splitlines() == ["another line"]


def test_an_element_has_the_bits_of_its_dtype():
    for name, bits in hlo.BITS.items():
        long = re.sub(r"^(bf|f|s|u|c)(?=\d)", lambda m: {"bf": "bfloat", "f": "float", "s": "int", "u": "uint",
                                                         "c": "complex"}[m[1]], name)  # fmt: skip
        long = re.sub(r"^float(\d)e", r"float\g<1>_e", long).replace("pred", "bool")
        known = ml_dtypes.iinfo if "int" in long else ml_dtypes.finfo
        plain = {"bool": 8, "complex64": 64, "complex128": 128}
        assert bits == (plain[long] if long in plain else known(long).bits), name


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse_hlo("HloModule m")
