"""The emulator itself: what it finds wrong with kernels, and single instructions beside NumPy."""

import numpy as np
import pytest

from benchmarks.static.ptx.arithmetic import dtype_of, wide
from benchmarks.static.ptx.binding import Executable
from benchmarks.static.ptx.flow import launch
from benchmarks.static.ptx.instructions import operation
from benchmarks.static.ptx.memory import Allocation, FaultError, GlobalMemory, shared_wavefronts
from benchmarks.static.ptx.parser import UnsupportedError

OUT, IN, THREADS = 0x100000, 0x200000, 64

# A kernel of two parameters; %rd3 is 4 bytes a thread into the first, %r2 into shared memory.
KERNEL = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
{before}
.visible .entry kernel(.param .u64 .ptr .global .align 1 out, .param .u64 in)
.reqntid 64
{{
    .reg .pred %p<4>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<10>;
    .loc 1 2 3 // source.py:2:3
    ld.param.b64 %rd1, [out];
    ld.param.b64 %rd2, [in];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mad.wide.u32 %rd3, %r1, 4, %rd1;
    mov.b32 %r3, global_smem;
    add.s32 %r2, %r2, %r3;
{body}
    ret;
}}
"""


def run(body, before="", size=4 * THREADS, shared=4 * THREADS, grid=(1,), given=()):
    """What a kernel writes, and its counters."""
    out = np.zeros(size, np.uint8)
    source = np.frombuffer(np.array(given, np.float32).tobytes(), np.uint8).copy()
    arrays = [Allocation(OUT, out, "out")]
    if given:
        arrays.append(Allocation(IN, source, "in", writable=False))
    executable = Executable(KERNEL.format(body=body, before=before))
    memory = GlobalMemory(arrays, executable.place["global"])
    counters = launch(executable, grid, THREADS, [OUT, IN], memory, shared)
    memory.leave()
    return out.view(np.uint32), counters


STORE = "st.global.b32 [%rd3], %r4;"
# Every thread stores what its neighbour of the other warp wrote.
EXCHANGE = "st.shared.b32 [%r2], %r1; {barrier} xor.b32 %r5, %r2, 128; ld.shared.b32 %r4, [%r5];"


@pytest.mark.parametrize("name", [".shared", ".shared::cta"])
def test_threads_exchange_numbers_across_a_barrier(name):
    exchange = EXCHANGE.format(barrier="bar.sync 0;").replace(".shared", name)
    found, counters = run(exchange + STORE)
    assert found.tolist() == [i ^ 32 for i in range(THREADS)]
    assert not counters.races
    assert not counters.unwritten
    assert counters.barriers == 1
    assert counters.wavefronts == {"store shared": 2, "load shared": 2, "store global": 2}
    assert counters.sectors == {"store global": 8}


def test_a_race_between_warps_is_found():
    _, counters = run(EXCHANGE.format(barrier="") + STORE)
    ((text, lanes),) = counters.races.items()
    assert "shared, between warps: ld.shared.b32 %r4, [%r5] (source.py:2:3)" in text
    assert lanes == THREADS


def test_a_race_between_the_lanes_of_a_warp_is_found():
    body = "st.shared.b32 [%r2], %r1; {sync} xor.b32 %r5, %r2, 4; ld.shared.b32 %r4, [%r5];"
    _, counters = run(body.format(sync="") + STORE)
    assert any("between lanes" in text for text in counters.races)
    assert not run(body.format(sync="bar.warp.sync -1;") + STORE)[1].races


def test_a_race_between_programs_is_found():
    _, counters = run("mov.u32 %r4, %ctaid.x;" + STORE, grid=(2,))
    assert any("between programs" in text for text in counters.races)


def test_a_store_after_another_warps_load_is_a_race():
    """As when thread 0 overwrites what others still read."""
    body = """ld.global.b32 %r4, [%rd1]; setp.eq.b32 %p1, %r1, 0;
    @%p1 st.global.b32 [%rd1], %r1; {} st.global.b32 [%rd3+256], %r4;"""
    assert run(body.format(""), size=512)[1].races
    mended = body.replace("setp", "bar.sync 0; setp")
    assert not run(mended.format(""), size=512)[1].races


def test_lanes_that_store_the_same_number_are_no_race():
    assert not run("mov.b32 %r4, 7; st.global.b32 [%rd1], %r4;")[1].races
    assert run("st.global.b32 [%rd1], %r1;")[1].races


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("st.global.b32 [%rd3+260], %r1;", "out of bounds: byte 512 to 516 of out"),
        ("prefetch.global.L2 [%rd3+261];", "out of bounds: byte 513 to 514 of out"),
        ("ld.shared.b32 %r4, [%r2+-4];", "of shared memory"),
        ("st.global.v2.b32 [%rd3], {%r1, %r1};", "misaligned: 32 lanes"),
        ("st.global.b32 [%rd2], %r1;", "in is only to be read"),
        ("setp.eq.b32 %p1, %r1, 0; @%p1 bra $end; bar.sync 0; $end:", None),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 bra $on; bra $on2; $on: bar.sync 0; bra $x; $on2: "
         "shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1; $x:", "some lanes of a warp do not come to shfl"),
    ],
)  # fmt: skip
def test_what_no_right_kernel_does_is_a_fault(body, words):
    if words is None:  # threads that have ended count as waiting
        assert run(body)[1].barriers == 1
        return
    with pytest.raises(FaultError, match=words):
        run(body, size=512, given=[1.0] * THREADS)


def test_shared_memory_that_nobody_wrote_is_noticed():
    found, counters = run("ld.shared.b32 %r4, [%r2];" + STORE)
    assert counters.unwritten == {"shared: ld.shared.b32 %r4, [%r2] (source.py:2:3)": 4 * THREADS}
    assert (found == 0xFFFFFFFF).all()


def test_threads_part_and_meet_again():
    body = """mov.b32 %r4, 0; mov.b32 %r5, 0;
    $loop: add.s32 %r4, %r4, %r5; add.s32 %r5, %r5, 1; setp.le.s32 %p1, %r5, %r1; @%p1 bra $loop;
    shfl.sync.bfly.b32 %r6, %r4, 1, 31, -1; add.s32 %r4, %r4, %r6;"""
    found, _ = run(body + STORE)
    sums = [i * (i + 1) // 2 for i in range(THREADS)]
    assert found.tolist() == [sums[i] + sums[i ^ 1] for i in range(THREADS)]


def test_a_branch_to_a_numbered_target():
    body = """and.b32 %r5, %r1, 1; mov.b32 %r4, 0;
    $targets: .branchtargets $even, $odd;
    brx.idx %r5, $targets; $even: mov.b32 %r4, 10; bra.uni $end; $odd: mov.b32 %r4, 11; $end:"""
    assert run(body + STORE)[0].tolist() == [10 + i % 2 for i in range(THREADS)]


def test_a_function_is_called_with_arguments_and_returns():
    before = """.func (.param .b32 result) twice(.param .b32 given) {
        .reg .b32 %r<3>; ld.param.b32 %r1, [given]; add.s32 %r2, %r1, %r1;
        st.param.b32 [result], %r2; ret; }"""
    body = """setp.lt.u32 %p1, %r1, 40; mov.b32 %r4, 5; @!%p1 bra $end;
    { .param .b32 param0; .param .b32 retval0; st.param.b32 [param0], %r1;
    call.uni (retval0), twice, (param0); ld.param.b32 %r4, [retval0]; } $end:"""
    found, _ = run(body + STORE, before)
    assert found.tolist() == [2 * i if i < 40 else 5 for i in range(THREADS)]


def test_local_memory_belongs_to_a_thread():
    body = """.local .align 8 .b8 depot[8]; mov.b64 %rd4, depot; cvta.local.u64 %rd5, %rd4;
    st.local.b32 [%rd4+4], %r1; bar.sync 0; ld.b32 %r4, [%rd5+4];"""
    found, counters = run(body + STORE)
    assert found.tolist() == list(range(THREADS))
    assert not counters.races


def test_registers_of_inline_assembly_and_vectors():
    body = """{ .reg .b16 low, high; mov.b32 {low, high}, %r1; mov.b32 %r4, {high, low}; }
    { .reg .b32 %r1; mov.b32 %r1, 9; add.s32 %r4, %r4, %r1; }"""
    assert run(body + STORE)[0].tolist() == [(i << 16) + 9 for i in range(THREADS)]


def test_labels_of_inline_assembly_belong_to_its_scope():
    add = "{{ @!%p1 bra cut; add.u32 %r4, %r4, {0}; bra done; cut: xor.b32 %r4, %r4, {0}; done: }}"
    body = f"setp.lt.u32 %p1, %r1, 8; mov.b32 %r4, 1; {add.format(1)} {add.format(4)}"
    found, _ = run(body + STORE)
    assert found.tolist() == [6 if i < 8 else 4 for i in range(THREADS)]


def test_reductions_of_a_warp_and_matrices():
    found, _ = run("redux.sync.add.s32 %r4, %r1, -1;" + STORE)
    assert found.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32
    # Each lane stores its number as two halves; a row of 8 halves is loaded by 4 lanes.
    body = """st.shared.b32 [%r2], %r1; bar.sync 0; and.b32 %r5, %r1, 7; shl.b32 %r5, %r5, 4;
    and.b32 %r6, %r1, 32; shl.b32 %r6, %r6, 2; add.s32 %r5, %r5, %r6; add.s32 %r5, %r5, %r3;
    ldmatrix.sync.aligned.m8n8.x1{}.shared.b16 {{%r4}}, [%r5];"""
    assert run(body.format("") + STORE)[0].tolist() == list(range(THREADS))
    halves = np.arange(32, dtype=np.uint32).view(np.uint16).reshape(8, 8)
    turned = np.ascontiguousarray(halves.T).view(np.uint32).ravel()
    assert run(body.format(".trans") + STORE)[0][:32].tolist() == turned.tolist()


def test_what_the_emulator_does_not_know_is_an_error():
    with pytest.raises(UnsupportedError, match=r"tanh.approx.f32"):
        Executable(KERNEL.format(body="tanh.approx.f32 %r4, %r1;", before=""))
    with pytest.raises(UnsupportedError, match="declaration"):
        Executable(KERNEL.format(body=".tex .u32 texture;", before=""))


def test_wavefronts_of_shared_memory():
    lane = np.arange(32)
    assert shared_wavefronts(4 * lane, lane, 4) == 1
    assert shared_wavefronts(0 * lane, lane, 4) == 1  # one word for all
    assert shared_wavefronts(8 * lane, lane, 4) == 2  # two words in each of 16 banks
    assert shared_wavefronts(128 * lane, lane, 4) == 32
    assert shared_wavefronts(8 * lane, lane, 8) == 2  # two halves of a warp
    assert shared_wavefronts(16 * lane, lane, 16) == 4
    assert shared_wavefronts(4 * (lane % 8), lane, 4) == 1


# Single instructions.


def values(kind):
    """Numbers of a type, the odd ones of it too, and as many again."""
    generator = np.random.default_rng(0)
    dtype = np.dtype(dtype_of(kind))
    patterns = generator.integers(0, 2 ** (8 * dtype.itemsize), 400, dtype=f"u{dtype.itemsize}")
    edges = np.array([0, 1, 2, 31, 32, 33, 127, 255], patterns.dtype)
    near_one = generator.standard_normal(200)
    if kind in ("f16", "f32", "f64"):
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-40], dtype)
        return np.concatenate([patterns.view(dtype), special, near_one.astype(dtype)])
    return np.concatenate([patterns, edges]).view(dtype)


def call(opcode, *operands):
    with np.errstate(all="ignore"):
        return operation(tuple(opcode.split("."))).function(*operands)


def same(a, b):
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def shuffled(kind, seed):
    return np.random.default_rng(seed).permutation(values(kind))


@pytest.mark.parametrize("kind", ["u16", "s32", "u32", "s64"])
def test_integer_arithmetic(kind):
    a, b = values(kind), shuffled(kind, 1)
    bits = 8 * a.dtype.itemsize
    exact = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    assert call(f"mul.lo.{kind}", a, b).tolist() == (a * b).tolist()
    assert call(f"mul.hi.{kind}", a, b).tolist() == [x >> bits for x in exact]
    if bits < 64:
        assert call(f"mul.wide.{kind}", a, b).tolist() == exact
    small = np.where(b == 0, 1, b)
    wholes = [
        abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1)
        for x, y in zip(a, small, strict=True)
    ]
    wrapped = np.array([n % 2**bits for n in wholes], f"u{bits // 8}").view(a.dtype)
    assert same(call(f"div.{kind}", a, small), wrapped)
    assert same(call(f"rem.{kind}", a, small), a - wrapped * small)
    by = np.arange(len(a), dtype=np.uint32) % 70
    shifts = [int(x) >> int(n) for x, n in zip(a, by, strict=True)]
    assert call(f"shr.{kind}", a, by).tolist() == shifts


def test_bits():
    a, b, c = (shuffled("u32", i) for i in range(3))
    assert same(call("lop3.b32", a, b, c, np.array([0xE8], np.uint32)), (a & b) | (a & c) | (b & c))
    assert same(call("bfe.u32", a, np.array([4], np.uint32), np.array([3], np.uint32)), a >> 4 & 7)
    signed = call("bfe.s32", a.view(np.int32), np.array([2], np.uint32), np.array([1], np.uint32))
    assert same(signed, -(a >> 2 & 1).astype(np.int32))
    assert same(call("prmt.b32", a, b, np.array([0x5410], np.uint32)), a & 0xFFFF | b << 16)
    assert same(call("prmt.b32", a, b, np.array([0x0123], np.uint32)), a.byteswap())
    sign = call("prmt.b32", a, b, np.array([0xBBBB], np.uint32))
    assert same(sign, np.where(a >> 31, 0xFFFFFFFF, 0).astype(np.uint32))
    nine = np.array([9], np.uint32)
    assert same(call("shf.r.clamp.b32", a, b, nine), a >> 9 | b << 23)
    assert same(call("shf.l.wrap.b32", a, b, nine), b << 9 | a >> 23)
    taken = call("bfi.b32", a, b, np.array([8], np.uint32), np.array([4], np.uint32))
    assert same(taken, b & 0xFFFFF0FF | (a & 15) << 8)
    numbers = [np.array(x, np.int32) for x in ([-1, 2, 256], [255, -(2**31), 7])]
    both = call("cvt.pack.sat.u8.s32.b32", *numbers, np.array([0x12345678], np.uint32))
    assert both.tolist() == [0x567800FF, 0x56780200, 0x5678FF07]
    pair, four = np.array([-2 & 0xFFFF | 3 << 16], np.uint32), np.array([0x80FF027F], np.uint32)
    third = np.array([5], np.int32)
    assert call("dp2a.lo.s32.s32", pair, four, third).tolist() == [5 - 2 * 127 + 3 * 2]
    assert call("dp2a.hi.s32.s32", pair, four, third).tolist() == [5 - 2 * -1 + 3 * -128]


def test_products_of_fp32_are_rounded_in_all_directions():
    a, b = (shuffled("f32", i) for i in range(2))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    exact = a.astype(np.float64) * b.astype(np.float64)
    with np.errstate(over="ignore"):
        near = exact.astype(np.float32)
    assert same(call("mul.f32", a, b), near)
    for mode, towards in (("rm", -np.inf), ("rp", np.inf), ("rz", 0.0)):
        found = call(f"mul.{mode}.f32", a, b)
        wrong = {"rm": near > exact, "rp": near < exact, "rz": np.abs(near) > np.abs(exact)}[mode]
        assert same(found, np.where(wrong, np.nextafter(near, np.float32(towards)), near)), mode


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60, 1 + 2.0**-11 + 2.0**-23),  # just above a tie
        (1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60), 1 + 2.0**-11),
        (2.0**-100, 2.0**-50, 2.0**-149, 2.0**-148),  # a tie among subnormal numbers
        (3e38, 10.0, -np.inf, -np.inf),
    ],
)
def test_a_fused_product_is_rounded_once(a, b, c, want):
    given = [np.array([x], np.float32) for x in (a, b, c)]
    assert call("fma.rn.f32", *given)[0] == np.float32(want)
    wide_ones = [x.astype(np.float64) for x in given]
    assert call("fma.rn.f64", *wide_ones)[0] == a * b + c


def test_packed_numbers():
    a, b = np.array([1.5, 2.0], np.float32), np.array([0.25, -3.0], np.float32)
    found = call("fma.rn.f32x2", a.view(np.uint64), b.view(np.uint64), a.view(np.uint64))
    assert found.view(np.float32).tolist() == [1.875, -4.0]
    halves = [x.astype(np.float16).view(np.uint32) for x in (a, b)]
    assert call("mul.f16x2", *halves).view(np.float16).tolist() == [0.375, -6.0]


def test_halves_and_fp32_are_summed_in_fp32():
    half, single = np.array([1.0, 65504.0], np.float16), np.array([2.0**-20, 1.0], np.float32)
    assert call("sub.rn.f32.f16", half, single).tolist() == [1 - 2.0**-20, 65503.0]
    assert call("add.rn.f32.bf16", np.array([0x3F80], np.uint16), single[:1])[0] == 1 + 2.0**-20
    assert call("fma.rn.f32.f16", half, half, single)[0] == np.float32(1 + 2.0**-20)


def test_both_halves_are_compared_at_once():
    """A subnormal number and NaN are not zero, -0 is."""
    halves = np.array([[0x0001, 0x8000], [0x7FFF, 0x0000]], np.uint16)
    words = halves.view(np.uint32).ravel()
    found = call("setp.neu.f16x2", words, np.zeros(2, np.uint32))
    assert found.tolist() == [[True, False], [True, False]]
    assert call("set.neu.u32.f16x2", words, np.zeros(2, np.uint32)).tolist() == [0xFFFF, 0xFFFF]
    body = """mov.b32 %r4, 0; mov.b32 %r5, 0; shl.b32 %r6, %r1, 16;
        setp.neu.f16x2 %p1|%p2, %r6, %r5; @%p1 add.u32 %r4, %r4, 1; @%p2 add.u32 %r4, %r4, 2;"""
    stored, _ = run(body + STORE)
    assert stored.tolist() == [0] + [2] * (THREADS - 1)


def test_directed_roundings_of_zero_and_of_small_numbers():
    one, less = np.array([1.0], np.float32), np.array([-1.0], np.float32)
    assert np.signbit(call("add.rm.f32", one, less))[0]
    assert not np.signbit(call("add.f32", one, less))[0]
    tiny = np.array([1e-40, -1e-40], np.float32)
    assert np.signbit(call("mul.ftz.f32", tiny, one)).tolist() == [False, True]
    assert not call("mul.ftz.f32", tiny, one).any()
    assert call("mul.f32", tiny, one).all()
    assert call("sqrt.approx.ftz.f32", tiny).tolist() == [0.0, 0.0]


def test_smallest_and_largest():
    a, b = values("f32"), shuffled("f32", 1)
    assert same(np.abs(call("max.f32", a, b)), np.abs(np.fmax(a, b)))
    assert same(call("max.NaN.f32", a, b), np.maximum(a, b))
    zeros = np.array([0.0, -0.0], np.float32)
    assert np.signbit(call("min.f32", zeros, zeros[::-1])).all()
    assert not np.signbit(call("max.f32", zeros, zeros[::-1])).any()


def test_comparisons_and_what_is_chosen_by_them():
    a, b = values("f32"), shuffled("f32", 1)
    nan = np.isnan(a) | np.isnan(b)
    assert same(call("setp.lt.f32", a, b), a < b)
    assert same(call("setp.geu.f32", a, b), ~(a < b))
    assert same(call("setp.nan.f32", a, b), nan)
    assert same(call("setp.ne.f32", a, b), (a != b) & ~nan)
    assert same(call("set.gt.f32.f32", a, b), (a > b).astype(np.float32))
    halves, others = values("b16"), shuffled("b16", 1)
    assert same(call("setp.le.bf16", halves, others), wide(halves, "bf16") <= wide(others, "bf16"))
    chosen = call("selp.b32", a.view(np.uint32), b.view(np.uint32), a < b)
    assert same(chosen.view(np.float32), np.where(a < b, a, b))


def test_conversions():
    torch = pytest.importorskip("torch")
    x = values("f32")
    both = torch.from_numpy(x)
    numbers = ~np.isnan(x)
    bf16 = both.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert same(call("cvt.rn.bf16.f32", x)[numbers], bf16[numbers])
    assert same(
        call("cvt.rz.bf16.f32", x)[numbers], (x.view(np.uint32) >> 16).astype(np.uint16)[numbers]
    )
    assert same(call("cvt.f32.bf16", bf16), both.bfloat16().float().numpy())
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    assert same(call("cvt.rn.f16.f32", x), half)
    pair = call("cvt.rn.f16x2.f32", x, x[::-1])
    assert same((pair >> 16).astype(np.uint16)[numbers], half.view(np.uint16)[numbers])
    assert same(call("cvt.rmi.f32.f32", x), np.floor(x))
    wholes = np.array([1.5, -1.5, 3e9, -3e9, np.nan, 2.0**40], np.float32)
    assert call("cvt.rzi.s32.f32", wholes).tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    assert call("cvt.rni.s64.f64", wholes.astype(np.float64)).tolist()[:2] == [2, -2]
    assert call("cvt.rn.f32.s64", np.array([2**24 + 1, 2**62 - 1])).tolist() == [2**24, 2.0**62]
