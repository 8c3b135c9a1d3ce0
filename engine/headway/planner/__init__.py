"""The planner: what a recipe will do on a machine whose rates were measured, before it runs."""

from headway.planner.forecast import Estimate, Forecast, estimate
from headway.planner.rates import Curve, Rates, constant, proportional, read_rates
from headway.planner.scenario import Scenario, scenario_of
from headway.planner.simulate import Simulation, simulate

__all__ = [
    "Curve",
    "Estimate",
    "Forecast",
    "Rates",
    "Scenario",
    "Simulation",
    "constant",
    "estimate",
    "proportional",
    "read_rates",
    "scenario_of",
    "simulate",
]
