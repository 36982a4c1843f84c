r"""Numbers as answers write them: `1,000`, `2 1/2`, `\frac{3}{4}`, `1.6\times10^{-19}`, `10\%`, `18 dollars`, `4210_5`.

Values are exact (`Fraction`) and short: what has too many digits is not a number here. Two of them are compared with what
belongs to them: percent signs, units, bases. Reads texts that notation.tidy has gone over. Refuses algebra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

PercentReading = Literal["either", "hundredths", "units"]
_MAX_CHARACTERS = 120
_MAX_EXPONENT = 400
_MAX_BASE = 36
_WHOLE = r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?:\ \d{3})+(?!\d)|\d+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.\d*)?|\.\d+)"
_BODY = re.compile(
    rf"""(?P<sign>[-+]?)(?P<currency>[$€£¥]?)(?P<inner_sign>[-+]?)(?:
      (?P<repeating>\d*\.\d*)(?:\\(?:overline|bar|dot)(?:\{{(?P<period>\d+)\}}|(?P<digit>\d))|\((?P<bracketed>\d+)\))
    | (?:(?P<mixed>\d+)\ ?)?\\frac(?:\{{(?P<top>[-+]?{_DECIMAL})\}}\{{(?P<bottom>[-+]?{_DECIMAL})\}}|(?P<ab>\d)\ ?(?P<b>\d)
        |(?P<c>\d)\{{(?P<d>{_DECIMAL})\}}|\{{(?P<e>{_DECIMAL})\}}(?P<f>\d))
    | (?:(?P<plain_mixed>\d+)\ )?(?P<plain_top>{_DECIMAL})/(?P<plain_bottom>{_DECIMAL})
    | (?P<mantissa>{_DECIMAL})(?:\ ?(?:\\times|\\cdot|\*|x)\ ?10\^(?:\{{(?P<power>[-+]?\d+)\}}|(?P<power_digit>[-+]?\d+))
        |e(?P<exponent>[-+]?\d+))
    | 10\^(?:\{{(?P<ten>[-+]?\d+)\}}|(?P<ten_digit>[-+]?\d+))
    | (?P<number>{_DECIMAL})
    )""",
    re.VERBOSE,
)
_SUFFIX = re.compile(
    r"""\ ?(?P<percent>%|percent(?:age)?\b|per\ cent\b)?
    \ ?(?P<unit>[^\W\d_][^\d=<>+*,;:(){}\[\]\\]*(?:\^\{?[-\d]\}?)?|[°€£¥]c?|)""",
    re.VERBOSE,
)
_BASED = re.compile(
    r"\(?([0-9a-z]{1,60})\)?_(?:\{(?:base )?(\d{1,2}|[a-z]{3,8})\}|(\d{1,2}))"
    r"|([0-9a-z]{1,60}) (?:in )?\(?base (\d{1,2}|[a-z]{3,8})\)?"
)
_BASE_NAMES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASE_WORDS = {word: base for base, word in enumerate(_BASE_NAMES.split(), 2)}
_FUNCTIONS = """
pi sin cos tan cot sec csc log ln lg exp sqrt arcsin arccos arctan sinh cosh tanh mod or and to infty inf theta alpha beta
lambda phi max min plus minus over divided point squared cubed half halves thirds quarters fourths fifths sixths eighths tenths
one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety
is are was were not no isn't aren't impossible wrong
"""
_SIZES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NO_UNITS = frozenset(_FUNCTIONS.split())
_SHORT = """
m s g h l n j w v k c f t a b cm mm km nm kg mg ml hz pa ev kj mj gj kw mw kn mi ft in yd oz lb lbs hr hrs min sec ms us mol db
am pm au ly ha cc mph kph gb mb kb tb rs c° f°
"""
_SHORT_UNITS = frozenset(_SHORT.split())
_UNIT_NAMES = {
    name: short
    for short, names in {
        "m": "meter metre meters metres", "cm": "centimeter centimetre centimeters centimetres", "kg": "kilogram kilograms",
        "mm": "millimeter millimetre millimeters millimetres", "km": "kilometer kilometre kilometers kilometres",
        "g": "gram grams", "s": "second seconds sec secs", "h": "hour hours hr hrs", "min": "minute minutes mins",
        "l": "liter litre liters litres", "ml": "milliliter millilitre milliliters millilitres", "ft": "foot feet",
        "in": "inch inches", "mi": "mile miles", "lb": "pound pounds lbs", "°": "degree degrees deg", "$": "dollar dollars usd",
        "oz": "ounce ounces", "yd": "yard yards", "n": "newton newtons", "j": "joule joules", "w": "watt watts",
        "v": "volt volts", "hz": "hertz", "k": "kelvin", "€": "euro euros eur", "¢": "cent cents",
        "mi/h": "mph", "km/h": "kph kmh kmph",
    }.items()
    for name in names.split()
}  # fmt: skip
_NAME_OF_UNIT = r"(?:(?:square|cubic|sq\.?) )?{}(?:(?:/| per )[a-zA-Z]+)?"
_POWER = r"\^\{?\d\}?"
_UNIT_AT_END = re.compile(
    rf"(?:\\(?:text(?:rm)?|mathrm|mbox)\s*\{{[\s~]*(?P<wrapped>{_NAME_OF_UNIT.format('[a-zA-Z]+')})\.?\s*(?P<inner>{_POWER})?\s*\}}"
    rf"|(?<=[\s~])(?P<bare>{_NAME_OF_UNIT.format('[a-zA-Z]{2,}')}))\s*(?P<outer>{_POWER})?[\s.]*$"
)
_MULTIPLIED = re.compile(r"times (?!as\b|more\b|a\b)")
_TIGHT = ("m/s", "g/l")  # that need no space before them, though a letter begins them
_POWERS = (("square ", "^2"), ("sq ", "^2"), ("sq. ", "^2"), ("cubic ", "^3"))


@dataclass(frozen=True)
class Quantity:
    value: Fraction
    percent: bool = False
    unit: str = ""
    """Its short form, "" for none."""
    base: int | None = None
    digits: str = ""
    """As written, where it has a base."""


@lru_cache(maxsize=4096)
def parse_quantity(tidied: str) -> Quantity | None:
    """The number that the whole text is, with what belongs to it; None for anything else."""
    if not tidied or len(tidied) > _MAX_CHARACTERS:
        return None
    tidied = tidied.casefold()
    if (match := _BASED.fullmatch(tidied)) is not None:
        return _read_based(match)
    match = _BODY.match(tidied)
    if match is None:
        return None
    suffix = _SUFFIX.fullmatch(tidied, match.end())
    if suffix is None:
        return None
    value = _read_value(match)
    unit = _read_unit(suffix["unit"], spaced=" " in suffix[0][: len(suffix[0]) - len(suffix["unit"])])
    size, _, counted = (unit or "").partition(" ")
    if value is not None and unit and size in _SIZES:
        value, unit = value * _SIZES[size], counted.removeprefix("of ")
    if value is None or unit is None or (match["sign"] and match["inner_sign"]):
        return None
    if "-" in (match["sign"], match["inner_sign"]):
        value = -value
    unit = "" if suffix["percent"] else unit or _UNIT_NAMES.get(match["currency"], match["currency"])
    return Quantity(value, bool(suffix["percent"]), unit)


def compare_quantities(wanted: Quantity, given: Quantity, percent: PercentReading = "either", tolerance: float = 0.0) -> bool:
    """Whether both are the same number of the same thing, to a share of `tolerance`; one that names no unit, base or percent
    takes the other's."""
    if wanted.base is not None or given.base is not None:
        return _compare_based(wanted, given)
    if wanted.unit and given.unit and wanted.unit != given.unit:
        return False
    if wanted.percent == given.percent:
        return _is_close(wanted.value, given.value, tolerance)
    with_sign, other = (wanted.value, given.value) if wanted.percent else (given.value, wanted.value)
    readings = {"either": (with_sign, with_sign / 100), "hundredths": (with_sign / 100,), "units": (with_sign,)}[percent]
    return any(_is_close(reading, other, tolerance) for reading in readings)


def _is_close(wanted: Fraction, given: Fraction, tolerance: float) -> bool:
    """The same, or near where one is not whole: whole numbers are right or wrong."""
    if wanted == given or tolerance == 0 or wanted.denominator == given.denominator == 1:
        return wanted == given
    return abs(wanted - given) <= Fraction(tolerance) * abs(wanted)


def _compare_based(wanted: Quantity, given: Quantity) -> bool:
    """By their values; an answer without the base may also have the digits."""
    without_it = wanted.base is not None and given.base is None and str(given.value) == wanted.digits.lstrip("0")
    return wanted.value == given.value or without_it


def _read_based(match: re.Match[str]) -> Quantity | None:
    digits, name = match[1] or match[4], match[2] or match[3] or match[5]
    base = _BASE_WORDS.get(name) or (int(name) if name.isdecimal() else 0)
    if not 2 <= base <= _MAX_BASE:
        return None
    try:
        return Quantity(Fraction(int(digits, base)), base=base, digits=digits)
    except ValueError:
        return None


def _read_value(match: re.Match[str]) -> Fraction | None:
    if match["repeating"] is not None:
        return _read_repeating(match["repeating"], match["period"] or match["digit"] or match["bracketed"])
    power = match["power"] or match["power_digit"] or match["exponent"] or match["ten"] or match["ten_digit"]
    if power is not None:
        mantissa = _read_decimal(match["mantissa"] or "1")
        return mantissa * Fraction(10) ** int(power) if len(power) < 6 and abs(int(power)) <= _MAX_EXPONENT else None
    if match["number"] is not None:
        return _read_decimal(match["number"])
    pairs = (("top", "bottom"), ("ab", "b"), ("c", "d"), ("e", "f"), ("plain_top", "plain_bottom"))
    top, bottom = next((match[one], match[other]) for one, other in pairs if match[one] is not None)
    below, above = _read_decimal(bottom), _read_decimal(top)
    whole = match["mixed"] or match["plain_mixed"]
    if below == 0 or (whole is not None and not 0 <= above < below):
        return None
    return above / below + (int(whole) if whole is not None else 0)


def _read_decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


def _read_repeating(start: str, period: str) -> Fraction:
    whole, _, decimals = start.partition(".")
    known = Fraction(int((whole + decimals) or 0), 10 ** len(decimals))
    return known + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))


def _read_unit(text: str, spaced: bool) -> str | None:
    """The short form of a unit; None where the text is none, as `x` of `5x`."""
    words = text.strip(" .").split()
    if not words:
        return ""
    name = " ".join(words)
    for spelled, power in _POWERS:
        if name.startswith(spelled):
            name = name.removeprefix(spelled) + power
    stem, caret, power = name.partition("^")
    known = stem in _UNIT_NAMES or stem in _SHORT_UNITS or "°" in stem or stem in "€£¥$"
    if not spaced and not known and not _begins_as_unit(stem):
        return None
    if not known and any(len(part) < 2 and not (part in _SHORT_UNITS or spaced) for part in re.split(r"[ /]", stem)):
        return None
    if (
        not _NO_UNITS.isdisjoint(stem.split())
        or _MULTIPLIED.match(stem)
        or (not known and len(stem) < 3)
        or (len(stem) == 1 and stem.isalpha() and not spaced)
    ):
        return None
    short = "/".join(_UNIT_NAMES.get(part.strip(), part.strip()) for part in stem.replace(" per ", "/").split("/"))
    short = short[:-1] if len(short) > 3 and short.endswith("s") and not short.endswith("ss") else short
    return short + caret + power.strip("{}")


def take_unit(answer: str) -> tuple[str, str]:
    r"""(what stands before it, the short form of the unit) of an answer that ends in a known one, as `12\pi\text{ cm}^2`; ""
    for none. One of a single letter counts in \text or \mathrm only: `12\pi h` may be a product."""
    answer = answer.replace("$", "").rstrip()
    match = _UNIT_AT_END.search(answer[-_MAX_CHARACTERS:])
    if match is None:
        return answer, ""
    name = match["wrapped"] or match["bare"]
    stem, _, power = (_read_unit(name.casefold().strip(), spaced=True) or "").partition("^")
    if not all(part in _SHORT_UNITS or part in _UNIT_NAMES.values() or part == "unit" for part in stem.split("/")):
        return answer, ""
    power = power or (match["outer"] or match["inner"] or "").strip("^{} ")
    return answer[: len(answer) - len(match[0])], stem + (f"^{power}" if power else "")


def _begins_as_unit(stem: str) -> bool:
    """Of what stands right behind a number: whether it begins with a known name. `6abc` is a product."""
    first = re.split(r"[ /]", stem, maxsplit=1)[0]
    return stem in _TIGHT or (len(first) > 1 and (first in _UNIT_NAMES or first in _SHORT_UNITS or first in _SIZES))
