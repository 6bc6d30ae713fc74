"""A memory goes through text to the bit, and its draws follow from the seed and the position alone."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jppo.data.memory import AlgorithmMemory, from_text, to_text
from jppo.data.stream import Cursor, next_batch, remembered
from jppo.errors import UserError
from jppo.types import Prompt

RNG = np.random.default_rng(0)
DTYPES = ["?", "i1", "u2", "<i4", ">i8", "e", "<f4", ">f4", "f8", "c16", "<U3", "S2", "M8[s]", "m8[D]", "bfloat16"]
PROMPTS = [Prompt(f"p{i}", "", "", np.array([i], np.int32), "", {}) for i in range(6)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_an_array_keeps_dtype_shape_and_every_bit(dtype, shape):
    dtype = jnp.bfloat16.dtype if dtype == "bfloat16" else np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    bits = RNG.integers(0, 2 if dtype.kind == "b" else 256, size, dtype=np.uint8)
    if dtype.kind == "U":
        bits = np.frombuffer("".join("aé "[i % 3] for i in bits[: size // 4]).encode("utf-32-le"), np.uint8)
    array = bits.view(dtype).reshape(shape) if size else np.zeros(shape, dtype)  # NaNs of every kind among them
    for one in (array, np.asfortranarray(array)):
        found = from_text(json.loads(json.dumps(to_text({"x": [one]}))))["x"][0]
        assert (found.dtype, found.shape, found.tobytes()) == (one.dtype, one.shape, one.tobytes())
        assert found.flags.writeable


def test_other_values_are_what_they_were():
    memory = {
        "numbers": [1, -(10**30), 0.1, -0.0, 5e-324, float("inf")], "none": None, "true": True, "text": 'é"\n\x00',
        "scalar": np.float32(0.1), "nested": {"a": {"b": [[], {}]}}, 3: "by place", np.int64(4): {(): 1}.get(()),
        "__array__": 1, "__pairs__": [1],
    }  # fmt: skip
    found = from_text(to_text(memory))
    assert found == memory and type(found["scalar"]) is np.float32 and str(found["numbers"][3]) == "-0.0"
    assert from_text(to_text((1, (2,)))) == [1, [2]]
    assert to_text(jnp.arange(2)) == to_text(np.arange(2, dtype=np.int32))


@pytest.mark.parametrize(
    "wrong", [{1, 2}, object(), b"x", np.array([None]), {(): 1}, {(1, 2): 3}, np.zeros(2, "i4,f4")]
)
def test_what_cannot_be_written_is_an_error(wrong):
    with pytest.raises(TypeError):
        to_text({"x": wrong})


def memory(**functions):
    left_out = dict.fromkeys(("init", "choose", "columns", "update"))
    return AlgorithmMemory("algorithm.extension='x.py:x'", PROMPTS, **left_out | functions)


def test_draws_follow_from_seed_and_position_and_leave_the_memory_as_it_is():
    def choose(memory, rng, n):
        memory["drawn"] = True
        return rng.permutation(6)[:n]

    def draw(cursor, steps, seed=1):
        out = []
        for _ in range(steps):
            batch, cursor = next_batch(cursor, n=6, batch_size=2, seed=seed, shuffle=True, order_of=made)
            out.append(batch.tolist())
        return out, cursor

    made = memory(init=lambda prompts: {"n": len(prompts)}, choose=choose)
    whole, end = draw(Cursor(), 12)
    first, cursor = draw(Cursor(), 5)
    cursor = Cursor(**json.loads(json.dumps(dataclasses.asdict(cursor))))
    assert first + draw(cursor, 7)[0] == whole and len({tuple(batch) for batch in whole}) > 6
    assert (end.epoch, end.index, end.curriculum) == (3, 6, "")
    assert draw(Cursor(), 12, seed=2)[0] != whole
    assert from_text(remembered(end, made, None).curriculum) == {"n": 6}, "a checkpoint has the first memory too"


def test_columns_are_asked_for_each_prompt_once():
    asked = []

    def columns(memory, places):
        asked.append(places.tolist())
        return {"v": places / 2, "w": places > 2, "more": 0}

    found = memory(columns=columns).columns("", np.array([4, 0, 4, 3]), ["w", "v"])
    np.testing.assert_array_equal(found, np.float32([[1, 2], [0, 0], [1, 2], [1, 1.5]]))
    assert found.dtype == np.float32 and asked == [[0, 3, 4]]


def test_a_memory_without_init_begins_as_none():
    made = memory(update=lambda memory, step: (memory or 0) + step)
    cursor = remembered(remembered(Cursor(), made, 2), made, 3)
    assert cursor.curriculum == "5" and remembered(Cursor(), made, None).curriculum == "null"


def test_a_memory_that_is_not_returned_and_columns_that_are_not_finite_are_errors():
    forgetful = memory(init=lambda prompts: [0], update=lambda memory, step: memory.append(step))
    with pytest.raises(UserError, match=r"update returns None; return the memory for the next step"):
        remembered(Cursor(), forgetful, 2)
    with pytest.raises(UserError, match=r"columns returns 'v' with values that are not finite; correct it"):
        memory(columns=lambda memory, places: {"v": places * np.inf}).columns("", np.array([1, 2]), ["v"])


def test_an_error_of_a_function_is_one_line():
    def choose(memory, rng, n):
        raise ValueError("first\nsecond")

    with pytest.raises(UserError, match=r"algorithm.extension='x.py:x': prompts raises ValueError: first; correct it"):
        memory(choose=choose).check(2, [])
