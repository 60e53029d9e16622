"""The dynamic8 codec on 16-lane vectors (see NOTES.md).

Everything is an intrinsic or an njit function over int64 addresses, so a caller needs no array descriptors:

  decode{_s,_u}_64(codes_addr)                -> 4 vectors, the codebook values of 64 codes (not yet scaled)
  encode{_s,_u}_64(x_addr, r, absmax, codes)  64 float32 -> 64 codes;  r = 1 / absmax, exact division
  encode_block(signed, x_addr, absmax, codes, n)  any absmax, n a multiple of 64
  load_{f32,bf16,f16}(addr), store_{...}(addr, v)

The instruction set is chosen when the module is imported, from the features numba compiles for:
  VBMI    decode = 256-entry byte-plane tables in registers, exact
  AVX512  encode = per-octave and per-decade tables in registers
  other   decode = table look-up in memory, exact; encode = compare chain in plain vector IR
"""
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_vector import F, call, f32, host_features, i8, i16, i32, i64
from .numba_vector import spread as splat_ir
from .numba_vector import vector as V


def ptr(b, a): return b.inttoptr(a, ir.PointerType())

_feat = host_features()
VBMI = {"avx512f", "avx512bw", "avx512dq", "avx512vbmi"} <= _feat
AVX512 = {"avx512f", "avx512bw", "avx512dq"} <= _feat


# ------------------------------------------------------------------ codebook
def codebook(signed):
    import torch

    vals = [0.0, 1.0]
    for i in range(7):
        b = torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        v = ((b[:-1] + b[1:]) / 2 * 10 ** (i - 6)).tolist()
        vals += v + ([-x for x in v] if signed else [])
    return np.array(sorted(vals), dtype=np.float32)


BOOK = {s: codebook(s) for s in (True, False)}


def _fit(y, want, s0, k0):
    """The float32 pair (S, K) whose floor(fma(y, S, K)) is wrong for the fewest of these y."""
    best = None
    for i in range(-6, 7):
        s = np.float32(s0) + np.float32(i) * np.spacing(np.float32(s0))
        for j in range(-6, 7):
            k = np.float32(k0) + np.float32(j) * np.spacing(np.float32(want.max() + 1)) / np.float32(4)
            u = (y * np.float64(s) + np.float64(k)).astype(np.float32)
            bad = np.count_nonzero(np.floor(u) != want)
            if best is None or bad < best[0]:
                best = bad, float(s), float(k)
    return best[1:]


def lines(signed):
    """Segments e = 0..8 of y = |x| / absmax in [0, 1] (0: below the first decade; 8: the code of 1.0).
    T[e] is the largest float32 of segment e; there floor(min(S[e] * y + K[e], below 2**(e + e0))) is the position
    d = |code - 127| (signed, 2**(e - 1 + ...)) or code + 1 (unsigned), so segment e holds 2**(e + e0 - 1) positions."""
    book = BOOK[signed].astype(np.float64)
    pos = book[127:] if signed else np.concatenate([[-1.0], book])    # position -> value
    mid = (pos[:-1] + pos[1:]) / 2                                     # between positions d and d + 1
    f = mid.astype(np.float32)
    below = np.where(f > mid, np.nextafter(f, np.float32(0)), f)       # largest float32 that stays lower
    T, S, K = [], [0.0], [0.5]
    for e in range(7):
        n = 2 ** (e + (not signed))
        T.append(below[n - 1] if signed or e else np.float32(0))
        s = n / 0.9 * 10.0 ** (6 - e)
        k = n - n / 9
        if n > 1:
            m = below[n : 2 * n - 1]
            y = np.concatenate([(m.view(np.int32) + i).view(np.float32) for i in range(-7, 9)]).astype(np.float64)
            want = np.concatenate([np.arange(n, 2 * n - 1) + (i > 0) for i in range(-7, 9)])
            s, k = _fit(y, want, s, k)
        S.append(s), K.append(k)
    T.append(below[2 * n - 1])
    S.append(0.0), K.append(2.0 * n + 0.5)
    return np.array(T), np.array(S), np.array(K)


LINES = {s: lines(s) for s in (True, False)}
BIAS = {True: 126, False: 127}         # exponent of the positions in segment e: 2**(e + bias - 127)
FLOOR = {True: 2.0**-30, False: 2.0**-23}


def octave_table(signed):
    """D[low 5 bits of the biased exponent]: w = bits(y) + D has segment + BIAS as its exponent field."""
    T = LINES[signed][0]
    D = np.zeros(32, dtype=np.uint64)
    for exp in range(96, 128):
        lo, hi = np.float32(2.0 ** (exp - 127)), np.float32(2.0 ** (exp - 126))
        base = int(np.sum(lo > T)) + BIAS[signed]
        inside = T[(lo <= T) & (hi > T)]
        d = ((base - exp) << 23) % 2**32
        if len(inside):
            assert len(inside) == 1
            d += 2**23 - 1 - (int(inside[0].view(np.uint32)) & (2**23 - 1))
        D[exp & 31] = d % 2**32
    return D.astype(np.uint32)


def segment_tables(signed):
    """S and K by the low 4 bits of the exponent field."""
    _, S, K = LINES[signed]
    s, k = np.zeros(16), np.zeros(16)
    for e in range(9):
        s[(e + BIAS[signed]) & 15], k[(e + BIAS[signed]) & 15] = S[e], K[e]
    return s, k


# ------------------------------------------------------------------ constants
def cvec(t, vals):
    vals = [float(np.float32(v)) for v in vals] if t is f32 else [int(v) for v in vals]
    return ir.Constant(V(t, len(vals)), vals)


def csplat(t, v, n=16):
    return cvec(t, [v] * n)


def perm16(b, table, idx):
    """16-entry float table in one register."""
    return call(b, "llvm.x86.avx512.permvar.sf.512", V(f32), cvec(f32, table), idx)


def perm32i(b, table, idx):
    return call(b, "llvm.x86.avx512.vpermi2var.d.512", V(i32), cvec(i32, table[:16]), idx, cvec(i32, table[16:]))


def shuf(b, x, y, idx):
    return b.shuffle_vector(x, y, ir.Constant(V(i32, len(idx)), list(idx)))


TRANSPOSE = [4 * (i % 4) + i // 4 for i in range(16)]  # of a 4x4 matrix of dwords


# ------------------------------------------------------------------ decode
def _decode64_vbmi(b, codes, book):
    z = b.bitcast(codes, V(i32))
    codes = b.bitcast(shuf(b, z, z, TRANSPOSE), V(i8, 64))
    high = b.icmp_signed("<", codes, csplat(i8, 0, 64))
    raw = book.view(np.uint8).reshape(256, 4)
    planes = []
    for k in range(4):
        t = [cvec(i8, raw[64 * j : 64 * j + 64, k]) for j in range(4)]
        lo, hi = (call(b, "llvm.x86.avx512.vpermi2var.qi.512", V(i8, 64), t[j], codes, t[j + 1]) for j in (0, 2))
        planes.append(b.select(high, hi, lo))

    def unpack(x, y, size, n):  # in 128-bit lanes
        lane = 16 // size
        out = []
        for half in (0, lane // 2):
            idx = []
            for L in range(0, n, lane):
                for j in range(lane // 2):
                    idx += [L + half + j, n + L + half + j]
            out.append(shuf(b, x, y, idx))
        return out

    w01, w23 = ([b.bitcast(w, V(i16, 32)) for w in unpack(planes[k], planes[k + 1], 1, 64)] for k in (0, 2))
    out = []
    for h in (0, 1):
        out += unpack(w01[h], w23[h], 2, 32)
    return [b.bitcast(o, V(f32)) for o in out]


def _lines_decode(signed):
    """Arithmetic decode, per binary exponent of d (signed: max(d, .5)) or code + 1 (unsigned)."""
    pos = BOOK[signed][127:].astype(np.float64) if signed else BOOK[signed].astype(np.float64)
    a, c = np.zeros(16), np.zeros(16)
    for e in range(7):
        n = 2 ** (e + (not signed))
        d0 = n if signed else n - 1
        s = 0.9 * 10.0 ** (e - 6) / n
        x0 = n                                     # the float whose exponent is the index
        ex = (127 + int(np.log2(n))) & 15
        a[ex] = np.float32(s)
        c[ex] = pos[d0] - np.float64(np.float32(s)) * x0
    ex = (127 + (7 if signed else 8)) & 15
    c[ex] = 1.0
    return a, c


def _decode64_arith(b, codes, signed):
    a, c = _lines_decode(signed)
    out = []
    for k in range(4):
        x = b.zext(shuf(b, codes, codes, range(16 * k, 16 * k + 16)), V(i32))
        x = b.bitcast(b.or_(x, csplat(i32, 0x4B000000)), V(f32))
        f = b.fsub(x, csplat(f32, 2.0**23 + 127 if signed else 2.0**23 - 1))
        if signed:
            g = call(b, "llvm.fabs.v16f32", V(f32), f)
            h = csplat(f32, 0.5)
            g = b.select(b.fcmp_ordered(">", g, h), g, h)
        else:
            g = f
        idx = b.lshr(b.bitcast(g, V(i32)), csplat(i32, 23))
        v = call(b, "llvm.fma.v16f32", V(f32), g, perm16(b, a, idx), perm16(b, c, idx))
        if signed:
            v = call(b, "llvm.copysign.v16f32", V(f32), v, f)
        out.append(v)
    return out


def _table(b, book, name):
    gv = b.module.globals.get(name)
    if gv is None:
        data = cvec(f32, book)
        gv = cgutils.global_constant(b, name, ir.Constant(ir.ArrayType(f32, 256), [float(v) for v in book]))
        gv.align = 64
    return gv


def _decode64_table(b, addr, book, name):
    gv = _table(b, book, name)
    base = ptr(b, addr)
    out = []
    for k in range(4):
        v = ir.Constant(V(f32), ir.Undefined)
        for j in range(16):
            p = b.gep(base, [ir.Constant(i64, 16 * k + j)], source_etype=i8)
            c = b.zext(b.load(p, typ=i8), i64)
            q = b.gep(gv, [ir.Constant(i64, 0), c], source_etype=ir.ArrayType(f32, 256))
            v = b.insert_element(v, b.load(q, typ=f32), ir.Constant(i32, j))
        out.append(v)
    return out


def make_decode(signed, how=None):
    how = how or ("vbmi" if VBMI else "table")

    @intrinsic
    def decode64(tyctx, addr):
        def gen(c, b, s, args):
            if how == "table":
                vs = _decode64_table(b, args[0], BOOK[signed], "dynamic8_" + "us"[signed])
            else:
                codes = b.load(ptr(b, args[0]), typ=V(i8, 64), align=1)
                vs = _decode64_vbmi(b, codes, BOOK[signed]) if how == "vbmi" else _decode64_arith(b, codes, signed)
            return c.make_tuple(b, s.return_type, vs)

        return types.UniTuple(F, 4)(types.int64), gen

    return decode64


decode_s_64, decode_u_64 = make_decode(True), make_decode(False)


# ------------------------------------------------------------------ encode
def _divide(b, x, r, absmax, exact):
    """x / absmax with the reciprocal r: Markstein's correction gives the rounded quotient."""
    fma = lambda *a: call(b, "llvm.fma.v16f32", V(f32), *a)  # noqa: E731
    q = b.fmul(x, r)
    if exact:
        rem = fma(b.fneg(q), absmax, x)
        q = fma(rem, r, q)
    return q


def _fabs(b, x):
    return call(b, "llvm.fabs.v16f32", V(f32), x)


def _encode16_avx512(b, x, r, absmax, signed, exact):
    """-> int32 lanes: signed: code - 127; unsigned: code + 1 (0 for x = 0)"""
    S, K = segment_tables(signed)
    i = lambda v: ir.Constant(i32, v)  # noqa: E731
    q = _divide(b, x, r, absmax, exact)
    floor = csplat(f32, FLOOR[signed])
    if signed:   # max(|q|, floor) in one instruction
        y = call(b, "llvm.x86.avx512.mask.range.ps.512", V(f32), q, floor, i(0b1011), floor, ir.Constant(i16, -1), i(4))
    else:
        y = b.select(b.fcmp_ordered(">", q, floor), q, floor)
    bits = b.bitcast(y, V(i32))
    w = b.add(bits, perm32i(b, octave_table(signed), b.lshr(bits, csplat(i32, 23))))
    e = b.lshr(w, csplat(i32, 23))
    u = call(b, "llvm.fma.v16f32", V(f32), y, perm16(b, S, e), perm16(b, K, e))
    top = b.bitcast(b.or_(w, csplat(i32, 0x7FFFFF)), V(f32))
    u = b.select(b.fcmp_ordered("<", u, top), u, top)
    if signed:
        u = call(b, "llvm.copysign.v16f32", V(f32), u, q)
    u = b.fptosi(u, V(i32))
    if not signed:
        u = b.select(b.fcmp_ordered(">", x, csplat(f32, 0.0)), u, csplat(i32, 0))
    return u


def _pack64_avx512(b, us, signed):
    w = [call(b, "llvm.x86.avx512.packssdw.512", V(i16, 32), us[i], us[i + 1]) for i in (0, 2)]
    w = [b.add(x, csplat(i16, 127 if signed else -1, 32)) for x in w]
    z = b.bitcast(call(b, "llvm.x86.avx512.packuswb.512", V(i8, 64), *w), V(i32))
    return b.bitcast(shuf(b, z, z, TRANSPOSE), V(i8, 64))


def _encode16_generic(b, x, r, absmax, signed, exact):
    """Compare chain: select S and K by 8 thresholds; plain vector IR.  -> int8 code"""
    T, S, K = LINES[signed]
    q = _divide(b, x, r, absmax, exact)
    y = _fabs(b, q) if signed else q
    floor = csplat(f32, FLOOR[signed])
    if not signed:
        y = b.select(b.fcmp_ordered(">", y, floor), y, floor)
    first = 0 if signed else 1
    top = lambda e: csplat(f32, np.nextafter(np.float32(2.0 ** (e + 1 + BIAS[signed] - 127)), np.float32(0)))  # noqa: E731
    s, k, m = csplat(f32, S[first]), csplat(f32, K[first]), top(first)
    for e in range(first, 8):
        c = b.fcmp_ordered(">", y, csplat(f32, T[e]))
        s = b.select(c, csplat(f32, S[e + 1]), s)
        k = b.select(c, csplat(f32, K[e + 1]), k)
        m = b.select(c, top(e + 1), m)
    u = call(b, "llvm.fma.v16f32", V(f32), y, s, k)
    u = b.select(b.fcmp_ordered("<", u, m), u, m)
    if signed:
        u = call(b, "llvm.copysign.v16f32", V(f32), u, q)
        u = b.fptosi(u, V(i32))
        u = b.add(u, csplat(i32, 127))
        u = b.select(b.icmp_signed(">", u, csplat(i32, 0)), u, csplat(i32, 0))
    else:
        u = b.sub(b.fptosi(u, V(i32)), csplat(i32, 1))
        u = b.select(b.fcmp_ordered(">", x, csplat(f32, 0.0)), u, csplat(i32, 0))
    return b.trunc(u, V(i8))


def make_encode(signed, how=None, exact=True):
    how = how or ("avx512" if AVX512 else "generic")

    @intrinsic
    def encode64(tyctx, x, r, absmax, codes):
        def gen(c, b, s, args):
            addr, r, a, out = args
            r, a = splat_ir(b, r), splat_ir(b, a)
            us = []
            for k in range(4):
                p = ptr(b, b.add(addr, ir.Constant(i64, 64 * k)))
                v = b.load(p, typ=V(f32), align=4)
                if how == "avx512":
                    us.append(_encode16_avx512(b, v, r, a, signed, exact))
                else:
                    u = _encode16_generic(b, v, r, a, signed, exact)
                    b.store(u, ptr(b, b.add(out, ir.Constant(i64, 16 * k))), align=1)
            if how == "avx512":
                b.store(_pack64_avx512(b, us, signed), ptr(b, out), align=1)
            return c.get_dummy_value()

        return types.void(types.int64, types.float32, types.float32, types.int64), gen

    return encode64


encode_s_64, encode_u_64 = make_encode(True), make_encode(False)


# ------------------------------------------------------------------ conversions
def _load(elem, convert, align):
    @intrinsic
    def load(tyctx, addr):
        return F(types.int64), lambda c, b, s, a: convert(b, b.load(ptr(b, a[0]), typ=V(elem), align=align))

    return load


def _store(convert, align):
    @intrinsic
    def store(tyctx, addr, x):
        def gen(c, b, s, a):
            b.store(convert(b, a[1]), ptr(b, a[0]), align=align)
            return c.get_dummy_value()

        return types.void(types.int64, F), gen

    return store


def _from_bf16(b, x):
    return b.bitcast(b.shl(b.zext(x, V(i32)), csplat(i32, 16)), V(f32))


def _to_bf16(b, x):
    """Round to nearest even; a NaN stays a NaN; subnormals are kept (vcvtneps2bf16 would flush them)."""
    u = b.bitcast(x, V(i32))
    odd = b.and_(b.lshr(u, csplat(i32, 16)), csplat(i32, 1))
    r = b.add(b.add(u, csplat(i32, 0x7FFF)), odd)
    r = b.select(b.fcmp_unordered("uno", x, x), csplat(i32, 0x7FC00000), r)
    return b.trunc(b.lshr(r, csplat(i32, 16)), V(i16))


half = ir.HalfType()
load_f32 = _load(f32, lambda b, x: x, 4)
load_bf16 = _load(i16, _from_bf16, 2)
load_f16 = _load(half, lambda b, x: b.fpext(x, V(f32)), 2)
store_f32 = _store(lambda b, x: x, 4)
store_bf16 = _store(_to_bf16, 2)
store_f16 = _store(lambda b, x: b.fptrunc(x, V(half)), 2)


@intrinsic
def finite(tyctx, *xs):
    """Mask: every x is finite (no NaN, no infinity)."""
    from .numba_vector import M

    def gen(c, b, s, a):
        a = [b.extract_value(a[0], k) for k in range(len(a[0].type.elements))] if len(a) == 1 else a
        m = None
        for x in a:
            k = b.fcmp_ordered("<", _fabs(b, x), csplat(f32, np.inf))
            m = k if m is None else b.and_(m, k)
        return m

    return M(types.StarArgTuple(xs)), gen


# ------------------------------------------------------------------ whole blocks
def make_encode_block(encode64):
    @njit(nogil=True, error_model="numpy")
    def encode_block(x, absmax, codes, n):
        """n (a multiple of 64) float32 at x -> codes.  absmax is the maximum of |x| (finite)."""
        a = absmax
        if not (a > np.float32(1e-28) and a < np.float32(1e30)):
            if a > np.float32(0):
                s = np.float32(2.0**64) if a < np.float32(1) else np.float32(2.0**-64)
                a = a * s
                for i in range(0, n, 16):
                    store_f32(x + 4 * i, load_f32(x + 4 * i) * s)
        r = np.float32(1) / a if a > np.float32(0) else np.float32(0)
        for i in range(0, n, 64):
            encode64(x + 4 * i, r, a, codes + i)

    return encode_block


def make_decode_block(decode64):
    @njit(nogil=True, error_model="numpy")
    def decode_block(codes, scale, out, n):
        for i in range(0, n, 64):
            a, b, c, d = decode64(codes + i)
            o = out + 4 * i
            store_f32(o, a * scale)
            store_f32(o + 64, b * scale)
            store_f32(o + 128, c * scale)
            store_f32(o + 192, d * scale)

    return decode_block


encode_s, encode_u = make_encode_block(encode_s_64), make_encode_block(encode_u_64)
decode_s, decode_u = make_decode_block(decode_s_64), make_decode_block(decode_u_64)
