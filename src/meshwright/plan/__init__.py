"""The Plan: everything needed to run a program on a cluster, and nothing of how it was found. Frozen data."""

from ..errors import PlanError as PlanError
from .io import load_plan as load_plan, save_plan as save_plan
from .plan import (
    Collective as Collective,
    InputPlan as InputPlan,
    Memory as Memory,
    OperatorPlan as OperatorPlan,
    ParameterPlan as ParameterPlan,
    Plan as Plan,
    Prediction as Prediction,
    Stage as Stage,
    Transfer as Transfer,
)
