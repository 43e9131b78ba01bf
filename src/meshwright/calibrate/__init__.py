"""Costs from measurements: the devices at hand timed, a cluster fitted to what was seen, and plans timed on them.

Read `cases` (what is measured), `measure` (how), `fit` (what is made of it), then `calibration` (the front door).
`origin` keeps a calibration from being used on other devices; `refine` times the best few plans and keeps the fastest.
"""

from .calibration import Calibration as Calibration, calibrate as calibrate
