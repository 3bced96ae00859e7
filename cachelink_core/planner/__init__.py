"""Transfer or re-read? Predicted times of every way to make a receiver know a prefix.

Pure data and arithmetic, no clock and no network. ``ways`` names the ways and what each costs in
exactness, ``shape`` says how many bytes travel, ``measures`` is what was measured, ``predict`` turns
these into seconds, ``choice`` picks the fastest admissible way and says why, ``questions`` spreads the
cost over several questions, ``crossover`` finds where the decision flips. ``readings`` is how measured
values are named when nodes publish them, ``pairs`` holds the published cross-model pairs.
"""

from cachelink_core.planner.choice import Plan, Wanted, choose
from cachelink_core.planner.measures import CodecRates, Job, Link, Measures, Prefill, Queue
from cachelink_core.planner.predict import Prediction, predict
from cachelink_core.planner.readings import Measurement
from cachelink_core.planner.shape import CacheShape, LayerShape
from cachelink_core.planner.ways import TEXT, Way, transfer_ways

__all__ = [
    "TEXT",
    "CacheShape",
    "CodecRates",
    "Job",
    "LayerShape",
    "Link",
    "Measurement",
    "Measures",
    "Plan",
    "Prediction",
    "Prefill",
    "Queue",
    "Wanted",
    "Way",
    "choose",
    "predict",
    "transfer_ways",
]
