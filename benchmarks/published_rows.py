"""Rows of published measurements as models, stated plans and hardware (`benchmarks/published.py`).

A row that leaves something open which a plan needs gets the choice its authors would have made: the fastest that fits,
among the candidates that `StatedRow.candidates` lists. A row that says something we cannot express is refused with the
reason (`Inexpressible`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from published_cells import Inexpressible, Row, check_cells, number
from published_clusters import cluster_of, device_kind
from published_frameworks import Generation, generation_of
from published_models import model_of, note_of, precision_of
from published_named import widest
from published_plans import candidates, check_sizes, sizes_of, whole_batch
from stated import StatedPlan

from meshwright.cluster import Cluster
from meshwright.zoo import gpt, llama, wide_resnet


@dataclass(frozen=True, kw_only=True)
class StatedRow:
    """A row made ready.

    Args:
      row_id: of the row.
      source: of the row.
      generation: of its framework.
      family_name: module of the zoo.
      config: of the model, of one microbatch on all devices.
      candidates: the plans it may mean; one if it says everything.
      batch: samples of a step, in whole microbatches.
      rounded: the batch that the row states over this one.
      cluster: a host, or hosts.
      device_kind: as the tables write it.
      narrow_products: whether products run in float8.
      one_layer: whether only a layer of the model was measured.
      note: what was taken for granted.
    """

    row_id: str
    source: str
    generation: Generation
    family_name: str
    config: Any
    candidates: tuple[StatedPlan, ...]
    batch: int
    rounded: float
    cluster: Cluster
    device_kind: str
    narrow_products: bool
    one_layer: bool
    note: str = ""

    @property
    def family(self) -> Any:
        """The module of the zoo."""
        return import_module(f"meshwright.zoo.{self.family_name}")

    @property
    def profile_key(self) -> str:
        """Of its efficiency profile."""
        return f"{self.generation.name}/{self.device_kind}"

    def config_of(self, plan: StatedPlan, *, layers: int | None = None) -> Any:
        """The model at the size of a microbatch, or one like it of other depth."""
        config = replace(self.config, global_batch=self.batch // plan.microbatches)
        return config if layers is None else replace(config, layers=layers)

    @staticmethod
    def baseline(plan: StatedPlan) -> StatedPlan:
        """What a percentage is of: nothing computed again, no sequence parallelism."""
        return replace(plan, recompute="none", sequence_parallel=False)


def stated_row(row: Row) -> StatedRow:
    """A row made ready.

    Raises:
      Inexpressible: saying why it cannot.
    """
    check_cells(row)
    generation, model, told = generation_of(row), row["model"], number(row, "gbs")
    if not row.get("accelerator"):
        raise Inexpressible("no accelerator is stated")
    if "U-Net" in model or "AmoebaNet" in model or model.startswith("ResNet"):
        raise Inexpressible(f"{model}: batch size and depth are not stated")
    if told is None:
        raise Inexpressible("the global batch is not stated")
    sizes, cluster = sizes_of(row), cluster_of(row)
    batch = whole_batch(row, told, sizes)
    device = cluster.hosts[0].device
    try:
        family, config = model_of(row, generation, batch, device)
    except ValueError as error:  # a shape that the zoo's model cannot have
        raise Inexpressible(f"{model}: {error}") from error
    check_sizes(row, sizes, generation)
    one_layer = row.get("status") == "per-layer"
    if one_layer and (family not in (gpt, llama) or config.layers != 1 or sizes.pipeline > 1):
        # A layer's time is what a second layer adds to a stage.
        raise Inexpressible("the time of a layer is told of a model of one layer without a pipeline; try n_layers = 1")
    searched = family is wide_resnet and "auto" in (row.get("shard") or "")
    slices = sizes.devices // cluster.hosts[0].devices if cluster.hosts[0].torus else 1
    plans = candidates(row, generation, sizes, batch=batch, slices=slices, searched=searched)
    _check_elements(config, batch // min(plan.microbatches for plan in plans))
    return StatedRow(
        row_id=row["row_id"], source=row["source"], generation=generation,
        family_name=family.__name__.rpartition(".")[2], config=config,
        candidates=plans, batch=batch, rounded=told / batch, cluster=cluster, device_kind=device_kind(row),
        narrow_products=precision_of(row, device)[1], one_layer=one_layer,
        note=note_of(row),
    )  # fmt: skip


def _check_elements(config: Any, samples: int) -> None:
    """Refuse what has tensors of more elements than a compiler can count: it does not return."""
    if isinstance(config, wide_resnet.WideResNetConfig):
        return
    wide = widest(config)
    elements = max(samples * getattr(config, "sequence", 1) * wide, config.layers * config.hidden * wide)
    if elements > 2**62:
        raise Inexpressible(
            f"a tensor of {elements:.1e} elements, needed {2**62:.1e} at most; try a smaller microbatch"
        )
