"""What elementary functions are written over: Elements of a Machine, and a dtype's coefficients.

An `Element` has Python's operators, each of which is a Tile op; whose text, the Machine says. Its
`table` is the constants of its dtype; its methods are the few combinations that many functions use.
Invariant: an Element is computed with only by ops that Tile IR has.

Every coefficient below was fitted for this file (Remez exchange, or rational interpolation at
Chebyshev points, in 50 decimal digits) and is listed from the highest power to the lowest. The file
is long because their tables are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, Union

from ..core.dtype import DType, bool_, float32, float64, int32, int64, uint32, uint64
from .numeric import COMPARE
from .operators import Operators


class Machine(Protocol):
    """What computes Tile ops on values of its own: registers, vectors, arrays.

    Three promises matter. `multiply_add` rounds once. Comparisons with NaN are false. Results may
    not be reassociated or contracted. Shifts are by less than the width.

    Two methods branch. `rarely(rare, *inputs)` gives done(*inputs, *values), where near(*inputs)
    gives a mask and the values that hold outside it, far(*inputs) those inside; the
    inputs may be of another Machine. `repeat(going, step, x)` takes x to step(x) while going(x)
    holds, each element by itself; only `far` may use it.
    """

    clamps: frozenset[DType]  # where one instruction is minimum, and maximum

    def constant(self, value: float, dtype: DType) -> Any:
        """A number."""

    def apply(self, name: str, dtype: DType, *values: Any) -> Any:
        """A Tile op by name, on values of a dtype (of `where`: the last two)."""

    def bitcast(self, x: Any, source: DType, target: DType) -> Any:
        """The same bits."""

    def convert(self, x: Any, source: DType, target: DType) -> Any:
        """The nearest number."""

    def repeat(
        self, going: Callable[[Element], Element], step: Callable[[Element], Element], x: Element
    ) -> Element:
        """A loop of each element."""

    def rarely(self, rare: Rare, *inputs: Element) -> Element:
        """One way for most elements, and another for few."""


class Rare(NamedTuple):
    """A function that few elements need another way for, which a Machine's `rarely` takes."""

    name: str
    near: Callable[..., Any]
    far: Callable[..., Any]
    done: Callable[..., Element]


Number = Union["Element", float]
INTEGERS = {32: int32, 64: int64}
UNSIGNED = {32: uint32, 64: uint64}
FLOATS = {32: float32, 64: float64}


@dataclass(slots=True, eq=False)
class Element(Operators):
    """A value of one dtype that a Machine holds; a number beside it takes its dtype."""

    machine: Machine
    held: Any
    dtype: DType

    __hash__ = None  # type: ignore[assignment]

    def operate(self, name: str, *values: Number) -> Element:
        """An op on values of its dtype."""
        m, d = self.machine, self.dtype
        held = [v.held if isinstance(v, Element) else m.constant(v, d) for v in values]
        return Element(m, m.apply(name, d, *held), bool_ if name in COMPARE else d)

    def floor(self) -> Element:
        """Rounded down."""
        return self.operate("floor", self)

    def root(self) -> Element:
        """The square root."""
        return self.operate("square_root", self)

    def at_most(self, limit: float) -> Element:
        """The lesser of itself and a number; NaN stays NaN."""
        if self.dtype in self.machine.clamps:
            return self.operate("minimum", limit, self)
        return where(limit < self, limit, self)

    def at_least(self, limit: float) -> Element:
        """The greater of itself and a number; NaN stays NaN."""
        if self.dtype in self.machine.clamps:
            return self.operate("maximum", limit, self)
        return where(self < limit, limit, self)

    def seen_as(self, dtype: DType) -> Element:
        """The same bits as another dtype."""
        return Element(self.machine, self.machine.bitcast(self.held, self.dtype, dtype), dtype)

    @property
    def bits(self) -> Element:
        """The bits of a float as an integer."""
        return self.seen_as(INTEGERS[self.dtype.bits])

    def as_float(self) -> Element:
        """The float that has these bits."""
        return self.seen_as(FLOATS[self.dtype.bits])

    def to(self, dtype: DType) -> Element:
        """The nearest number of another dtype."""
        return Element(self.machine, self.machine.convert(self.held, self.dtype, dtype), dtype)

    def to_float(self) -> Element:
        """The float nearest to an integer."""
        return self.to(FLOATS[self.dtype.bits])

    @property
    def table(self) -> SimpleNamespace:
        """The constants of floats of this width."""
        return TABLES[self.dtype.bits]

    def constant(self, value: float) -> Element:
        """A number of the same dtype."""
        return Element(self.machine, self.machine.constant(value, self.dtype), self.dtype)

    def clamp(self, limits: tuple[float, float]) -> Element:
        """Held within the limits; NaN stays NaN."""
        return self.at_least(limits[0]).at_most(limits[1])

    def copy_sign(self, x: Element) -> Element:
        """What is not negative, with the sign of x."""
        sign = x.bits & self.table.sign_bit
        return (self.bits | sign).as_float()

    def nearest_integer(self, factor: float, offset: int) -> tuple[Element, Element]:
        """n = rint(x * factor): an integer whose low bits hold n + offset, and n as a float.

        Adding 1.5 * 2**digits leaves the integer in the low bits of the mantissa.
        """
        magic = 1.5 * 2.0**self.table.digits + offset
        shifted = multiply_add(self, factor, magic)
        return shifted.bits, shifted - magic

    def power_of_two(self) -> Element:
        """2**n where the low bits of an integer hold n + bias."""
        return (self << self.table.digits).as_float()

    def scale_by_power(self, doubled: Element) -> Element:
        """x * 2**n where the low bits of `doubled` hold n + 2 * bias, rounded once.

        Two factors, 2**floor(n/2) and 2**ceil(n/2), reach subnormals and infinity.
        """
        half = doubled >> 1
        rest = doubled - half
        return self * half.power_of_two() * rest.power_of_two()


def where(mask: Element, a: Number, b: Number) -> Element:
    """a where the mask holds, else b; one of them is no plain number."""
    like = a if isinstance(a, Element) else b
    assert isinstance(like, Element)
    return like.operate("where", mask, a, b)


def multiply_add(a: Element, b: Number, c: Number) -> Element:
    """a * b + c, rounded once."""
    return a.operate("multiply_add", a, b, c)


def multiply_high(a: Element, b: Element) -> Element:
    """The upper half of a product of integers without sign."""
    return a.operate("multiply_high", a, b)


def shift_down(x: Element, n: Element | int) -> Element:
    """x >> n of an integer without sign: zeros come in."""
    kind = UNSIGNED[x.dtype.bits]
    whole, by = x.seen_as(kind), n.seen_as(kind) if isinstance(n, Element) else n
    return whole.operate("shift_right", whole, by).seen_as(x.dtype)


def polynomial(x: Element, coefficients: Coefficients) -> Element:
    """Horner: one multiply_add per degree."""
    result: Number = coefficients[0]
    for coefficient in coefficients[1:]:
        result = x.operate("multiply_add", result, x, coefficient)
    assert isinstance(result, Element)
    return result


def two_sum(a: Number, b: Element) -> tuple[Element, Element]:
    """a + b as a rounded sum and its exact error, where |a| >= |b| or a is zero."""
    total = a + b
    return total, b - (total - a)


def two_product(a: Element, b: Number) -> tuple[Element, Element]:
    """a * b as a rounded product and its exact error."""
    product = a * b
    return product, multiply_add(a, b, -product)


Coefficients = tuple[float, ...]


# All that depends on the dtype: its bits, constants split into parts (high first), the tables.
# fmt: off
_FLOAT32 = SimpleNamespace(
    digits=23,  # explicit bits of the mantissa
    bias=127,  # of the exponent
    sign_bit=-(1 << 31),
    one_bits=0x3f800000,  # bit pattern of 1.0
    two_thirds_bits=0x3f2aaaab,
    log2_e=1.442695,
    ln2=(0.6931472, -1.9046542e-09),
    half_pi=(1.5707964, -4.371139e-08, -1.7151245e-15),
    two_log2_e=(2.88539, 3.851926e-08),
    log10_2=(0.30103, -1.4320989e-08),
    log10_e=(0.4342945, -1.010305e-08),
    third=(0.33333334, -9.934108e-09),
    exp_range=(-105.0, 90.0),  # below: zero, above: infinity
    exp2_range=(-151.0, 130.0),
    expm1_range=(-20.0, 89.0),
    tanh_limit=9.02,  # tanh is 1 from here
    tanh_split=0.72,
    angle_limit=2097152.0,  # sin, cos and tan go another way from here on
    erf_limit=3.97,  # erf is 1 from here
    erf_split=1.1,
    exp=(0.0013839824, 0.008369341, 0.041668087, 0.16666515, 0.49999994),
    exp2=(0.00015353158, 0.0013398858, 0.009618438, 0.055503324, 0.24022648, 0.6931472),
    tanh=(-0.0050078165, 0.01994965, -0.053506393, 0.13328366, -0.33333158),
    tanh_exp=(0.13276081, 0.33532983, 0.6667032, 0.99997777, 0.9999997, 0.50000006),
    log=(
        -0.1319311, 0.13965943, -0.121148296, 0.14010252, -0.16685483, 0.20010082, -0.24999689,
        0.33333224,
    ),
    power=(0.09962105, 0.11077663, 0.14286235, 0.19999997),
    erf=(
        7.2361465e-05, -0.0007824757, 0.005167732, -0.026843518, 0.11283364, -0.3761261, 0.12837917,
    ),
    erf_tail=(
        -0.00017561187, 0.0031800566, -0.021896936, 0.06511586, -0.048600215, -0.065489635,
        -0.30755126, 1.005188,
    ),
    erfc=(
        2.1667789e-05, -0.00037305907, -0.0012513748, 0.0012824425, 0.008639491,
        -0.008047966, -0.054205723, 0.16405365, -0.1660313, -0.092763916, 0.2769784,
    ),
    erfc_center=2.0,  # the argument its polynomial has in the middle
    erfc_limit=10.2,  # erfc is 0 from here
    atan=(
        -0.0017881879, 0.010889659, -0.031130066, 0.05790822, -0.08400479, 0.109511405, -0.14264038,
        0.1999853, -0.333333,
    ),
    asin=(0.042218477, 0.02414884, 0.045476533, 0.0749525, 0.16666754),
    sin=(-0.00019461745, 0.008331747, -0.16666648),
    cos=(2.4374436e-05, -0.0013886782, 0.041666634),
    tan=(0.0054622837, -0.0022583576, 0.012814261, 0.020465467, 0.054229453, 0.13331057, 0.333334),
    sinh=(2.8175016e-06, 0.00019836056, 0.0083333505, 0.16666667),
    inverse_center=(
        (-0.009507896, -0.50399536, -0.99116784, -0.27023894, 0.0845598),
        (0.81194067, 3.3396342, 3.4576032, 1.0),
    ),
    inverse_middle=(
        (-6.401855e-05, -0.016640643, -0.19883832, -0.5167404, -0.36401653),
        (0.0072449422, 0.15212831, 0.7840943, 1.4491116, 1.0),
    ),
    inverse_tail=((), ()),
    inverse_middle_end=math.inf,
)

_FLOAT64 = SimpleNamespace(
    digits=52,
    bias=1023,
    sign_bit=-(1 << 63),
    one_bits=0x3ff0000000000000,
    two_thirds_bits=0x3fe5555555555555,
    log2_e=1.4426950408889634,
    ln2=(0.6931471805599453, 2.3190468138462996e-17),
    half_pi=(1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33),
    two_log2_e=(2.8853900817779268, 4.0710547481862066e-17),
    log10_2=(0.3010299956639812, -2.8037281277851704e-18),
    log10_e=(0.4342944819032518, 1.098319650216765e-17),
    third=(0.3333333333333333, 1.850371707708594e-17),
    exp_range=(-746.0, 712.0),
    exp2_range=(-1076.0, 1026.0),
    expm1_range=(-40.0, 710.0),
    tanh_limit=19.1,
    tanh_split=0.72,
    angle_limit=35184372088832.0,
    erf_limit=6.0,
    erf_split=1.0,
    exp=(
        2.4983332119578728e-08, 2.763099846016408e-07, 2.7557639292075348e-06,
        2.4801491180043045e-05, 0.00019841269447578062, 0.001388888894527423, 0.008333333333521377,
        0.04166666666652487, 0.16666666666666372, 0.5000000000000011,
    ),
    exp2=(
        4.5194872170579843e-10, 7.075613287822286e-09, 1.0177654996695965e-07,
        1.321542450398773e-06, 1.5252734740441102e-05, 0.00015403530478814962,
        0.0013333558145565139, 0.009618129107577094, 0.05550410866482458, 0.24022650695910172,
        0.6931471805599453,
    ),
    tanh=(
        4.513838981748371e-06, -2.624300221242816e-05, 8.708946174802268e-05,
        -0.00023409378478073407, 0.0005882406782873837, -0.0014553934766184887, 0.00359205312577063,
        -0.00886322699380709, 0.02186948791450988, -0.053968253941655144, 0.13333333333276154,
        -0.33333333333332904,
    ),
    tanh_exp=(
        2.559415807638036e-05, 0.00014147880311209105, 0.0007054751773227265, 0.0031745901742542297,
        0.01269841243445744, 0.04444444464631712, 0.13333333333699793, 0.33333333333191895,
        0.6666666666666464, 1.0000000000000036, 1.0, 0.5,
    ),
    log=(
        0.15379047261758616, 0.15248791745850065, 0.1818642594248087, 0.22222136793611386,
        0.28571429416229643, 0.39999999996044827, 0.6666666666667292,
    ),
    power=(
        0.06291211913271029, 0.05795283793003446, 0.06670632094931161, 0.07692201212885347,
        0.09090910805075655, 0.11111111095157544, 0.14285714285791273, 0.19999999999999857,
    ),
    erf=(
        -7.582374721326938e-10, 1.360454948720478e-08, -1.6181526179184639e-07,
        1.6443873621025249e-06, -1.492444680888206e-05, 0.0001205527970161108,
        -0.0008548325464454739, 0.005223977596428469, -0.02686617064193563, 0.11283791670936884,
        -0.37612638903183343, 0.12837916709551256,
    ),
    erf_tail=(
        1.2074230798992622e-12, -4.1052961159840864e-12, 4.751056836679659e-13,
        -3.525513687884311e-11, 2.5662730700996163e-10, -8.879560761019914e-10,
        3.6482089202106373e-09, -1.6254998041178988e-08, 6.739280588736667e-08,
        -2.727081700821077e-07, 1.0850680405337204e-06, -4.214563007531922e-06,
        1.59618435086094e-05, -5.886884465559741e-05, 0.00021101986549841933,
        -0.0007335909537873917, 0.0024670368056935654, -0.008001569382278407, 0.024937997087135875,
        -0.0743473467897623, 0.21080636406114006,
    ),
    erfc=(
        -1.907388627007971e-09, -1.3952812123042382e-08, -7.796210935750394e-09,
        1.1597564919712835e-07, 6.326381936013846e-08, -8.356886054802244e-07,
        3.006053020270926e-07, 5.718067004785881e-06, -1.1224293594679385e-05,
        -2.4403160497192634e-05, 0.0001506220523230599, -0.00019925553476007838,
        -0.0007577732963739462, 0.005031969765051122, -0.016197734065502876,
        0.03716751556105671, -0.0663303658110103, 0.09373283499690535, -0.10103906603637362,
        0.0680970542547336, 0.015379652102621091, -0.13962111684056286, 0.2329951186255525,
    ),
    erfc_center=4.0,
    erfc_limit=27.5,
    atan=(
        1.3230325925966636e-05, -0.00015221421222913297, 0.0008315729363477548,
        -0.0028856448845575376, 0.00719794866798421, -0.013902657390610463, 0.02198714867467777,
        -0.029905791903859346, 0.036643178642548874, -0.04219243978654946, 0.047223482929875917,
        -0.052535266846569596, 0.058805297655715266, -0.0666640441170371, 0.07692279886755374,
        -0.0909090700752909, 0.11111111007320741, -0.1428571428258717, 0.19999999999951734,
        -0.3333333333333307,
    ),
    asin=(
        0.03198464909620945, -0.016331355912538644, 0.01959755631635197, 0.006502245513917004,
        0.012175263451550159, 0.013884296851734233, 0.017359801632881686, 0.022371751495730237,
        0.03038195941616682, 0.04464285682140786, 0.07500000000345583, 0.16666666666665372,
    ),
    sin=(
        1.5896784535331377e-10, -2.505075831088636e-08, 2.7557313696374223e-06,
        -0.00019841269829833495, 0.00833333333332247, -0.16666666666666632,
    ),
    cos=(
        -1.1359863683682923e-11, 2.087572809488143e-09, -2.7557314393807204e-07,
        2.4801587289652787e-05, -0.0013888888888874457, 0.0416666666666666,
    ),
    tan=(
        2.10824780168934e-05, -4.581480687946994e-05, 9.124392743426394e-05, -2.839890242790114e-05,
        0.0001380025642240492, 0.0002216365854170127, 0.0005953266442556646, 0.001454693124501879,
        0.003592300226590697, 0.008863217870228849, 0.021869489705487494, 0.05396825392242435,
        0.13333333333424038, 0.33333333333332704,
    ),
    sinh=(
        7.775647377843648e-13, 1.605668824283337e-10, 2.505213066485862e-08, 2.7557319108528276e-06,
        0.00019841269841589182, 0.008333333333332915, 0.16666666666666669,
    ),
    inverse_center=(
        (-0.025478978037297133, -0.536202256606613, -2.8389605263633926, -5.775533043762014,
         -5.055902045548265, -1.6683448568438621, 0.03956695859500148, 0.08455979679682472),
        (0.030108495873496597, 0.8535064285470091, 6.247619308964538, 18.607684554381887,
         26.78300806716227, 19.70783200731746, 7.121354241112377, 1.0),
    ),
    inverse_middle=(
        (-4.8945046326824785e-08, 4.211309307781013e-06, 0.0005689329361521922,
         0.002878752274968022, -0.04015341831753834, -0.2991096365680716, -0.7458702189840372,
         -0.8425703034153388, -0.36401651756667175),
        (-0.0002717621129167826, -0.003460464336968291, 0.012861035305228205, 0.2667190189732569,
         1.1478256474671982, 2.3133305584087673, 2.3442070235673076, 1.0),
    ),
    inverse_tail=(
        (-5.778136818282387e-09, -6.858169669353056e-06, -0.00042469952466171073,
         -0.00796878444015724, -0.06330542611328203, -0.24043412948492035, -0.4326923927044405,
         -0.29601674371247577),
        (2.3065239405839317e-06, 0.00020314837501285852, 0.005252545055066724, 0.059169772564037486,
         0.33901712083077257, 1.0363508539839004, 1.61190898664389, 1.0),
    ),
    inverse_middle_end=2.75,
)
# fmt: on


TABLES = {32: _FLOAT32, 64: _FLOAT64}  # by bits
