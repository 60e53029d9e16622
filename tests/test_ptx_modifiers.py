"""What kernels have seldom: modifiers, odd operands, wrong uses of barriers, hidden races."""

import numpy as np
import pytest

from benchmarks.static.ptx.arithmetic import wide
from benchmarks.static.ptx.memory import FaultError
from benchmarks.static.ptx.parser import UnsupportedError
from test_ptx import STORE, THREADS, call, run, same, shuffled


def words(*numbers):
    return np.array(numbers, np.uint32)


def test_bf16_become_whole_numbers():
    """By their value, which their bits are not."""
    halves = shuffled("b16", 1)
    numbers = np.clip(np.nan_to_num(wide(halves, "bf16"), nan=0.0), -(2.0**31), 2.0**31 - 128)
    found = call("cvt.rzi.s32.bf16", halves)
    inside = np.abs(wide(halves, "bf16")) < 2.0**30
    assert inside.sum() > 100
    assert same(found[inside], numbers[inside].astype(np.int32))


def test_a_field_beyond_the_last_bit_is_filled_with_the_sign():
    given = np.array([-(2**31), 2**31 - 1], np.int32)
    assert call("bfe.s32", given, words(28), words(8)).tolist() == [-8, 7]
    assert call("bfe.s32", given, words(40), words(3)).tolist() == [-1, 0]
    assert call("bfe.u32", given.view(np.uint32), words(28), words(8)).tolist() == [8, 7]


def test_only_the_lower_byte_of_a_place_counts():
    assert call("bfi.b32", words(1), words(0), words(256 + 4), words(512 + 1)).tolist() == [16]
    assert call("bfe.u32", words(0xF0), words(256 + 4), words(512 + 3)).tolist() == [7]


def test_signs_of_packed_halves():
    pair = np.array([1.5, -2.0], np.float16).view(np.uint32)
    assert call("neg.f16x2", pair).view(np.float16).tolist() == [-1.5, 2.0]
    assert call("abs.f16x2", pair).view(np.float16).tolist() == [1.5, 2.0]
    assert call("set.lt.s32.f16x2", pair, words(0)).tolist() == [0xFFFF0000]


def test_small_halves_are_flushed_if_so_asked():
    small, one = np.array([-(2.0**-15)], np.float16), np.array([1.0], np.float16)
    for opcode in ("mul", "fma.rn"):
        given = (small, one, np.zeros(1, np.float16))[: 2 + (opcode == "fma.rn")]
        name, _, mode = opcode.partition(".")
        ends = f".{mode}" if mode else ""
        assert call(f"{name}{ends}.f16", *given)[0] == small[0]
        assert call(f"{name}{ends}.ftz.f16", *given)[0] == 0
    assert call("abs.ftz.f16", small.view(np.uint16))[0] == 0


def test_a_conversion_flushes_fp32_alone():
    tiny, small = np.array([1e-40]), np.array([2.0**-20], np.float16)
    assert call("cvt.rn.ftz.f32.f64", tiny)[0] == 0
    assert call("cvt.rn.f32.f64", tiny)[0] == np.float32(1e-40)
    assert call("cvt.ftz.f64.f32", tiny.astype(np.float32))[0] == 0
    assert call("cvt.ftz.f32.f16", small)[0] == 2.0**-20


def test_a_shuffle_takes_five_bits_of_a_distance():
    found, _ = run("shfl.sync.idx.b32 %r4, %r1, 35, 31, -1;" + STORE)
    assert found.tolist() == [3] * 32 + [35] * 32


def test_a_barrier_of_a_warp_is_one_of_all_its_lanes():
    body = "setp.lt.u32 %p1, %r1, 9; @!%p1 bra $end; bar.warp.sync {}; $end:"
    with pytest.raises(FaultError, match="some lanes of a warp do not come to bar"):
        run(body.format(-1) + STORE)
    with pytest.raises(UnsupportedError, match="only whole warps"):
        run(body.format(0x1FF) + STORE)
    whole = body.replace("9", "32").format("0xffffffff")
    assert len(run("mov.b32 %r4, 1;" + whole + STORE)[0]) == THREADS


def test_to_arrive_at_a_barrier_is_not_to_wait():
    with pytest.raises(UnsupportedError, match="one barrier of all"):
        run("bar.arrive 0, 64;")


def test_who_wrote_the_same_as_others_must_not_write_again():
    """The last lane is the one that is noted; its second number may come before the first ones."""
    body = "mov.b32 %r4, 7; st.shared.b32 [%r3], %r4; {} setp.eq.b32 %p1, %r1, 63; "
    body += "@%p1 st.shared.b32 [%r3], %r1;"
    assert any("between lanes" in text for text in run(body.format(""))[1].races)
    assert any("between warps" in text for text in run(body.format("bar.warp.sync -1;"))[1].races)
    assert not run(body.format("bar.sync 0;"))[1].races
