"""Carbon intensity of electricity grids, for the CO2 of a run."""

from __future__ import annotations

from difflib import get_close_matches

from trainwright.errors import UsageError

_TABLE = """
AE 561, AR 354, AT 111, AU 549, BE 138, BR 98, CA 170, CH 35, CL 291, CN 582, CZ 450, DE 381, DK 152, ES 174, FI 79,
FR 56, GB 238, GR 337, ID 676, IE 291, IL 583, IN 713, IS 28, IT 331, JP 485, KR 431, MX 507, MY 606, NL 268, NO 30,
PL 662, PT 166, RO 241, RU 441, SA 707, SE 41, SG 471, TH 550, TR 465, TW 642, UA 260, US 369, VN 475, ZA 708
"""
GRAMS_PER_KWH = {country: float(grams) for country, grams in map(str.split, _TABLE.split(","))}
"""Grams of CO2 equivalent for a kilowatt-hour, by ISO 3166 code of the country.

Yearly means of 2023, and of 2022 for AE, ID, IL, IS, MY, SA and UA.
Source: Ember and Energy Institute, processed by Our World in Data, as in the table ``global_energy_mix.json`` of
CodeCarbon.
"""


def grams_per_kwh(grid: str | float) -> float:
    """Return grams of CO2 for a kilowatt-hour from ``grid``: a country, or the grams. Raises UsageError."""
    if not isinstance(grid, str):
        return grid
    if (grams := GRAMS_PER_KWH.get(grid.upper())) is None:
        close = get_close_matches(grid.upper(), GRAMS_PER_KWH, n=1)
        meant = f"write {close[0]}, or" if close else "write"
        raise UsageError(
            f"no carbon intensity is known for {grid!r}", remedy=f"{meant} the grams of CO2 of a kWh there, such as 380"
        )
    return grams
