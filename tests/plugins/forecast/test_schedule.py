"""The order of kernels and collectives in a program, as XLA's text has it; against programs worked by hand."""

import jax
import jax.numpy as jnp
import pytest

from jppo.plugins.forecast import account, hlo
from jppo.plugins.forecast.schedule import CollectiveStart, Kernel, Loop, Wait, schedule_of
from jppo.preflight.programs import compile_program

SIZES = {"data": 1, "fsdp": 2}
TEXT = """HloModule m, is_scheduled=true

%body (t: (s32[])) -> (s32[]) {
  %t = (s32[]) parameter(0)
  %x = bf16[8,16]{1,0} parameter(1)
  %g = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %d = bf16[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %e = bf16[16,16]{1,0} all-gather-done(%g)
  ROOT %s = bf16[8,8]{1,0} add(%d, %d)
}

ENTRY %main (p: f32[]) -> f32[] {
  %p = f32[4]{0} parameter(0)
  %c = f32[4]{0} copy-start(%p)
  %w = (s32[]) while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_kernels_collectives_and_waits_come_in_the_order_of_the_text():
    loop, last = schedule_of(hlo.parse_hlo(TEXT), SIZES)
    assert isinstance(loop, Loop) and loop.times == 5
    start, product, wait, add = loop.body
    assert isinstance(start, CollectiveStart) and not start.waits and start.collectives[0].bytes == 16 * 16 * 2
    assert product == Kernel("product", (("bfloat16", 2 * 8 * 8 * 16),), (2 * 8 * 16 + 8 * 8) * 2)
    assert wait == Wait("g") and add == Kernel("memory", (), 3 * 8 * 8 * 2)
    assert isinstance(last, CollectiveStart) and last.waits, "a collective without a start makes the kernels wait"


def test_a_start_that_is_synchronous_waits():
    text = TEXT.replace("dimensions={0}", 'dimensions={0}, backend_config={"is_sync":true}')
    loop, _ = schedule_of(hlo.parse_hlo(text), SIZES)
    assert loop.body[0].waits


@pytest.mark.parametrize("kind, line", [("attention", "__cudnn$fmhaSoftmax"), ("memory", "other")])
def test_attention_is_a_kind_of_its_own(kind, line):
    config = 'backend_config={"intermediate_tensor_shape": {"dimensions": ["1","1","8","8"]}}'
    call = f'ROOT %a = bf16[8,16]{{1,0}} custom-call(%q), custom_call_target="{line}", {config}'
    text = f"HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {{\n  %q = bf16[8,16]{{1,0}} parameter(0)\n  {call}\n}}\n"
    (kernel,) = schedule_of(hlo.parse_hlo(text), SIZES)
    assert kernel.kind == kind


def test_the_schedule_has_all_of_a_programs_products():
    def f(x):
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ x), None), x, None, length=3)[0]

    lowered = jax.jit(f).lower(jnp.ones((32, 32)))
    found = compile_program(lowered, {"data": 1}, inspect=account.inspect).work

    def total(steps):
        return sum(
            one.times * total(one.body) if isinstance(one, Loop) else sum(n for _, n in one.flops) for one in steps
        )

    assert total(found.schedule) == found.total_flops == 3 * 2 * 32**3
    assert "schedule" not in found.as_dict()
