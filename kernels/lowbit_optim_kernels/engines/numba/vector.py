"""A vector of 16 fp32 lanes as a Numba type, so that a rule compiles to explicit vector code.

`F` is the vector and `M` the mask that comparing vectors gives. A rule written for numbers runs on
`F` unchanged: + - * / and comparisons, `sqrt`, `where`, `abs`, `sign`, `maximum`, `minimum` are
defined here in LLVM's generic vector instructions, which LLVM splits on machines with narrower
registers. A scalar operand is spread over the lanes.

Left to itself the auto-vectorizer gives up on a loop that decodes, updates and encodes: it would
have to prove that the codes do not overlap the parameters.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.core.imputils import lower_builtin, lower_cast
from numba.core.typeconv import Conversion
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

LANES = 16
f32, f64 = ir.FloatType(), ir.DoubleType()
i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
# No sign of zero; NaN and infinity keep their meaning. Nothing is contracted: the compiler chooses
# differently in different surroundings, and bf16 weights with a residual are to be as fp32 ones.
FLAGS = ("nsz",)


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """An LLVM vector type."""
    return ir.VectorType(element, lanes)


def host_features() -> str:
    """Features of the CPU that Numba compiles for, as LLVM takes them: all with a + or a -.

    What NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX switch off must not be asked for: LLVM would end the
    process.
    """
    # Numba reads its settings from the environment when it is imported.
    features = vars(config)["CPU_FEATURES"]
    return get_host_cpu_features() if features is None else features


_FEATURES = {feature[1:] for feature in host_features().split(",") if feature.startswith("+")}
HAS_AVX512 = {"avx512f", "avx512bw", "avx512dq"} <= _FEATURES
HAS_AVX2 = {"avx2", "fma"} <= _FEATURES
HAS_VBMI = HAS_AVX512 and "avx512vbmi" in _FEATURES
X86 = platform.machine().lower() in ("x86_64", "amd64")
HAS_FLOOR = not X86 or bool({"sse4.1", "sse4.2", "avx"} & _FEATURES)
# How instructions of AVX-512 round, without exceptions.
DOWNWARD, UPWARD = ir.Constant(i32, 9), ir.Constant(i32, 10)


def instruction_set() -> str:
    """The vector instructions that code is chosen for."""
    if HAS_AVX512:
        return "AVX-512 with VBMI" if HAS_VBMI else "AVX-512"
    return "AVX2" if HAS_AVX2 else f"any {platform.machine()}"


def converts_half() -> bool:
    """Whether LLVM turns fp16 into fp32 by instructions; without, it calls what is not there."""
    return not X86 or "f16c" in _FEATURES


class VectorType(types.Type):
    """Numba's side of a vector type."""

    def __init__(self, name: str, element: ir.Type) -> None:
        self.element = element
        super().__init__(name=name)

    def can_convert_from(self, typingctx, other):
        if self is F and isinstance(other, (types.Float, types.Integer)):
            return Conversion.safe
        return None


F = VectorType("f32x16", f32)
M = VectorType("mask16", i1)


class ScaledType(types.Type):
    """A vector that is still to be multiplied by a number; it becomes an `F` where one is needed.

    A moment is used times its decay. That times the block's scale is a number of the block, so that
    the product with the scale costs nothing.
    """

    def __init__(self) -> None:
        super().__init__(name="scaled_f32x16")


S = ScaledType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, numba_type) -> None:
        super().__init__(manager, numba_type, vector(numba_type.element))


@register_model(ScaledType)
class _ScaledModel(models.StructModel):
    def __init__(self, manager, numba_type) -> None:
        super().__init__(manager, numba_type, [("vector", F), ("scale", types.float32)])


def constant(element: ir.Type, values) -> ir.Constant:
    """A constant vector."""
    cast = float if element is f32 else int
    return ir.Constant(vector(element, len(values)), [cast(value) for value in values])


def fill(element: ir.Type, value: float, lanes: int = LANES) -> ir.Constant:
    """A constant vector of equal lanes."""
    return constant(element, [value] * lanes)


def spread(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """A vector whose lanes are all x."""
    undefined = ir.Constant(vector(x.type, LANES), ir.Undefined)
    one = builder.insert_element(undefined, x, ir.Constant(i32, 0))
    return builder.shuffle_vector(one, undefined, fill(i32, 0, LANES))


def like(x: ir.Value, value: float) -> ir.Constant:
    """A constant of the type of x, a number or a vector."""
    if isinstance(x.type, ir.VectorType):
        return fill(x.type.element, value, x.type.count)
    return ir.Constant(x.type, value)


def shuffle(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, index) -> ir.Value:
    """Lanes of x and y by a constant index."""
    return builder.shuffle_vector(x, y, constant(i32, list(index)))


def call(builder: ir.IRBuilder, name: str, returns: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic."""
    function_type = ir.FunctionType(returns, [argument.type for argument in arguments])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, function_type, name), arguments
    )


def fabs(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """|x| of a vector."""
    return call(builder, "llvm.fabs.v16f32", vector(f32), x)


def larger(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of numbers or of each pair of lanes; y where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def smaller(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The smaller of numbers or of each pair of lanes; y where one is NaN."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


def sign_of(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """-1, 0 or 1 by the sign of a number or of each lane; NaN gives 0."""
    zero, one, minus = (like(x, value) for value in (0.0, 1.0, -1.0))
    negative = builder.select(builder.fcmp_ordered("<", x, zero), minus, zero)
    return builder.select(builder.fcmp_ordered(">", x, zero), one, negative)


def multiply_add(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """The sum x y + z, rounded once where the machine can: elsewhere that would be a function."""
    return call(builder, "llvm.fmuladd.v16f32", vector(f32), x, y, z)


def floor(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The next integers below the lanes of a vector, which an int32 holds; in fp32."""
    if HAS_FLOOR:
        return call(builder, "llvm.floor.v16f32", vector(f32), x)
    cut = builder.sitofp(builder.fptosi(x, vector(i32)), vector(f32))  # LLVM would call a function
    over = builder.fcmp_ordered(">", cut, x)
    return builder.select(over, builder.fsub(cut, fill(f32, 1.0)), cut)


def pointer(builder: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    """An address as a pointer."""
    return builder.inttoptr(address, element.as_pointer())


@lower_cast(types.Float, F)
@lower_cast(types.Integer, F)
def _spread_scalar(context, builder, source, target, value):
    return spread(builder, context.cast(builder, value, source, types.float32))


@lower_cast(ScaledType, F)
def _multiply_by_scale(context, builder, source, target, value):
    x, scale = (builder.extract_value(value, k) for k in (0, 1))
    return builder.fmul(x, spread(builder, scale), flags=("reassoc", *FLAGS))


@intrinsic
def scaled(typing, x, scale):
    """The product of a vector and a number, which may become part of another product."""

    def emit(context, b, signature_, args):
        made = cgutils.create_struct_proxy(S)(context, b)
        made.vector, made.scale = args
        return made._getvalue()

    return S(F, types.float32), emit


def _is_operand(kind: types.Type) -> bool:
    return kind in (F, S) or isinstance(kind, (types.Float, types.Integer))


def _binary(op: Callable, emit: Callable, returns: VectorType = F, operand: VectorType = F) -> None:
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            vectors = (F, S) if operand is F else (operand,)
            if len(args) != 2 or not any(kind in vectors for kind in args):
                return None
            fits = _is_operand if operand is F else (lambda kind: kind is operand)
            return signature(returns, operand, operand) if all(map(fits, args)) else None

    infer_global(op)(Template)

    @lower_builtin(op, operand, operand)
    def lower(context, builder, signature_, args):
        return emit(builder, *args)


_binary(operator.add, lambda b, x, y: b.fadd(x, y, flags=FLAGS))
_binary(operator.sub, lambda b, x, y: b.fsub(x, y, flags=FLAGS))
_binary(operator.mul, lambda b, x, y: b.fmul(x, y, flags=("reassoc", *FLAGS)))
_binary(operator.truediv, lambda b, x, y: b.fdiv(x, y, flags=FLAGS))
_binary(operator.gt, lambda b, x, y: b.fcmp_ordered(">", x, y), M)
_binary(operator.lt, lambda b, x, y: b.fcmp_ordered("<", x, y), M)
_binary(operator.ge, lambda b, x, y: b.fcmp_ordered(">=", x, y), M)
_binary(operator.le, lambda b, x, y: b.fcmp_ordered("<=", x, y), M)
_binary(operator.eq, lambda b, x, y: b.fcmp_ordered("==", x, y), M)
_binary(operator.ne, lambda b, x, y: b.fcmp_unordered("!=", x, y), M)
_binary(operator.and_, lambda b, x, y: b.and_(x, y), M, M)
_binary(operator.or_, lambda b, x, y: b.or_(x, y), M, M)


@intrinsic
def fused(typing, x, y, z):
    """The sum x y + z, rounded once where the machine can, so that the product costs nothing."""
    if not (isinstance(x, types.Float) and y is S):
        return F(F, F, F), lambda c, b, s, a: multiply_add(b, *a)

    def emit(context, b, signature_, args):
        vector_, scale = (b.extract_value(args[1], k) for k in (0, 1))
        return multiply_add(b, vector_, spread(b, b.fmul(args[0], scale)), args[2])

    return F(types.float32, S, F), emit


@intrinsic
def rounded(typing, x, y):
    """The product x y, which is no part of a longer product."""
    return F(F, F), lambda c, b, s, a: b.fmul(*a)


@infer_global(operator.neg)
class _Negative(AbstractTemplate):
    def generic(self, args, kws):
        return signature(F, F) if args in ((F,), (S,)) else None


@lower_builtin(operator.neg, F)
def _negate(context, builder, signature_, args):
    return builder.fneg(args[0])


def of_one(kind: types.Type, returns: types.Type | None = None) -> Callable[[Callable], Callable]:
    """Make a function of a number or a vector of this kind from what builds its value."""

    def made(emit: Callable) -> Callable:
        @intrinsic
        def function(typing, x):
            return (returns or kind)(kind), lambda c, b, s, a: emit(b, *a)

        return function

    return made


def of_two(kind: types.Type) -> Callable[[Callable], Callable]:
    """`of_one` for two operands of a kind."""

    def made(emit: Callable) -> Callable:
        @intrinsic
        def function(typing, x, y):
            return kind(kind, kind), lambda c, b, s, a: emit(b, *a)

        return function

    return made


sqrt = of_one(F)(lambda b, x: call(b, "llvm.sqrt.v16f32", vector(f32), x))
absolute, sign = map(of_one(F), (fabs, sign_of))
splat = of_one(types.float32, F)(spread)
maximum, minimum = map(of_two(F), (larger, smaller))


@intrinsic
def where(typing, mask, x, y):
    """Lanes of x where the mask is true, of y elsewhere; a number's truth is that of all lanes."""
    truth = mask if isinstance(mask, types.Boolean) else M
    return F(truth, F, F), lambda c, b, s, a: b.select(*a)


def _is_finite(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Neither NaN nor infinite."""
    return b.fcmp_ordered("<", fabs(b, x), fill(f32, float("inf")))


finite = of_one(F, M)(_is_finite)
only_finite = of_one(F)(lambda b, x: b.select(_is_finite(b, x), x, fill(f32, 0.0)))  # else 0


def _fold(b: ir.IRBuilder, x: ir.Value, join: Callable) -> ir.Value:
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low = shuffle(b, x, x, range(lanes))
        x = join(low, shuffle(b, x, x, range(lanes, 2 * lanes)))
    return b.extract_element(x, ir.Constant(i32, 0))


def _higher(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of each pair of numbers >= 0 by bit pattern, so that NaN and infinity win.

    Where x begins as -0 it is the lowest of numbers, and any NaN that has a sign.
    """
    x, y = (b.bitcast(z, vector(i32)) for z in (x, y))
    return b.bitcast(b.select(b.icmp_unsigned(">", x, y), x, y), vector(f32))


def _higher_signed(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of each pair, x >= 0, by bit pattern; a NaN that has no sign wins."""
    x, y = (b.bitcast(z, vector(i32)) for z in (x, y))
    return b.bitcast(b.select(b.icmp_signed(">", x, y), x, y), vector(f32))


reach_unsigned = of_two(F)(_higher)
reach_above, reach_below = of_two(F)(_higher_signed), reach_unsigned
reach = of_two(F)(lambda b, top, x: _higher(b, top, fabs(b, x)))  # of magnitudes


@of_one(F, types.float32)
def highest(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The largest lane of x >= 0 by bit pattern, so that NaN and infinity win."""
    bits = b.bitcast(x, vector(i32))
    return b.bitcast(_fold(b, bits, lambda p, q: b.select(b.icmp_unsigned(">", p, q), p, q)), f32)


@of_one(F, types.float64)
def total(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The sum of the lanes, in fp64 and in a fixed order."""
    return _fold(b, b.fpext(x, vector(f64)), b.fadd)
