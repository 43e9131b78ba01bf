"""Predicted peaks beside those of the target's own compiler, which needs no device.

    python benchmarks/compiled_memory.py --platform tpu --only 'gpt3-125m*'
    python benchmarks/compiled_memory.py --platform gpu --record compiled.json
    python benchmarks/compiled_memory.py --platform tpu --every --record every.json

A row is a model, a cluster, a batch and what its plan of one stage is held to; a model of another's code is a file of
`benchmarks/programs` and a name in it (`public_programs.py` says where its code is found). It needs the compiler of the
cluster (`make setup-tpu`, `make setup-cuda`; docs/compilers.md); `--platform` picks the rows of one. XLA writes down
where every buffer lies before it generates code, which is most of compiling: as soon as it has, the process of the row
ends, so that a row takes ten seconds to a minute. `--every` has other rows: of each kind of device that is compiled
for, on as few hosts as hold twice its state, every reference model of 1 to 80 thousand million parameters.

Prints one JSON object: for each row the predicted and compiled peak in bytes, the device's limit and what XLA computes
again by itself; and over all rows the median error of peaks, the 90th percentile and the most that one is too low.
`--record FILE` writes rows as they are done, and runs only those that FILE does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# Model (+ scan: its layers as one loop; + remat: layers rematerialised; + own: attention as `meshwright plan` has it by
# default, fused where the cluster has a kernel), cluster, samples, preset (@8: in 8 microbatches).
Row = tuple[str, str, int, str]


def _rows() -> tuple[Row, ...]:
    small = ("gpt3-125m", "gpt3-125m+scan", "gpt3-125m+scan+remat", "gpt3-350m", "gpt3-350m+scan")
    tpus = ("tpu-v5e:8", "tpu-v5p:8", "tpu-v6e:8", "tpu-v4:8")
    found: list[Row] = [(model, cluster, 128, "") for model, cluster in product(small, tpus)]
    found += [(model, "tpu-v5e:8", 64, preset) for model, preset in product(small, ("data_parallel", "zero(stage=3)"))]
    found += [
        ("gpt3-1.3b+scan", "tpu-v5p:8", 64, ""), ("gpt3-1.3b+scan+remat", "tpu-v5e:8", 64, ""),
        ("gpt3-2.6b+scan", "tpu-v5p:16", 128, ""), ("llama3-8b", "tpu-v5p:16", 64, ""),
        ("llama3-8b", "tpu-v5p:32", 128, ""), ("llama3-8b", "tpu-v6e:32", 32, ""), ("moe-380m", "tpu-v5e:8", 64, ""),
        ("moe-690m", "tpu-v5p:8", 64, ""), ("moe-2.4b", "tpu-v5p:8", 64, ""),
        ("wresnet-250m", "tpu-v5e:8", 256, ""), ("wresnet-500m", "tpu-v5p:8", 512, ""),
        ("unet-470m", "tpu-v5e:8", 256, ""),
    ]  # fmt: skip
    gpus = ("dgx-h100:1", "dgx-a100-80:1", "p3.16xlarge:1")
    found += [(model, cluster, 128, "") for model, cluster in product(small, gpus)]
    found += [
        (model, "dgx-h100:1", 256, preset) for model, preset in product(small, ("data_parallel", "zero(stage=3)"))
    ]
    found += [
        ("gpt3-1.3b", "dgx-h100:1", 64, ""), ("gpt3-1.3b+scan", "dgx-h100:1", 256, ""),
        ("gpt3-2.6b", "dgx-h100:1", 512, ""), ("llama3-8b", "dgx-h100:2", 64, ""), ("llama3-8b", "dgx-h100:4", 128, ""),
        ("moe-380m", "dgx-h100:1", 256, ""), ("moe-2.4b", "dgx-h100:1", 512, ""),
        ("unet-470m", "dgx-h100:1", 1024, ""), ("wresnet-250m", "dgx-h100:1", 1536, ""),
        ("wresnet-500m", "dgx-h100:1", 1536, ""),
    ]  # fmt: skip
    found += [  # gradients of one loop, added up in it
        ("gpt3-1.3b+scan", "dgx-h100:1", 64, "data_parallel@8"), ("gpt3-1.3b+scan", "tpu-v5p:8", 64, "data_parallel@8"),
        ("llama3-8b", "dgx-h100:1", 64, "megatron(tp=8)@8"), ("llama3-8b", "tpu-v5p:16", 64, "megatron(tp=8)@8"),
        ("qwen3-30b-a3b+own", "dgx-h100:4", 64, "@8"), ("llama3-8b", "dgx-h100:2", 64, "zero(stage=3)@4"),
    ]  # fmt: skip
    found += [  # sums of gradients, whole and in parts
        (model, cluster, 64, f"zero(stage={stage})@4")
        for model, cluster, stage in product(("gpt3-1.3b", "gpt3-1.3b+scan"), ("dgx-h100:1", "tpu-v5p:8"), (1, 2))
    ]
    found += [  # gradients of rematerialised layers
        ("gpt3-350m+remat", "tpu-v5e:8", 64, "zero(stage=1)@1"),
        ("gpt3-350m+remat", "dgx-h100:1", 64, "zero(stage=1)@1"),
        ("gpt3-350m+remat", "dgx-h100:2", 128, "data_parallel@1"),
    ]  # fmt: skip
    found += [
        (f"{model}+own", cluster, batch, "")
        for model, cluster, batch in (
            ("llama3.2-3b", "tpu-v6e:16", 64), ("qwen3-8b", "tpu-v5p:16", 64), ("gemma3-4b", "tpu-v5e:32", 64),
            ("gpt-oss-20b", "tpu-v5p:32", 64), ("qwen3-30b-a3b", "tpu-v5p:32", 64), ("mixtral-8x7b", "tpu-v5p:64", 128),
            ("mamba2-1.3b", "tpu-v5e:16", 64), ("vit-g", "tpu-v5e:16", 256), ("dit-xl", "tpu-v4:8", 256),
            ("t5-3b", "tpu-v5p:8", 64), ("llama3.2-3b", "dgx-a100-80:1", 64), ("llama3-8b", "dgx-h100:1", 64),
            ("qwen3-8b", "dgx-b200:1", 128), ("qwen3-14b", "dgx-h100:2", 128), ("gemma3-12b", "dgx-h100:4", 64),
            ("gpt-oss-20b", "dgx-b200:1", 64), ("qwen3-30b-a3b", "dgx-h100:4", 64), ("mixtral-8x7b", "dgx-b200:2", 64),
            ("mamba2-2.7b", "dgx-h100:1", 64), ("vit-g", "dgx-a100-80:1", 256), ("dit-xl", "dgx-h100:1", 256),
            ("t5-3b", "dgx-h100:1", 128),
        )
    ]  # fmt: skip
    if "MESHWRIGHT_PROGRAMS" in os.environ:  # programs that nobody here wrote
        found += [
            ("gemma.py:gemma3_1b", "tpu-v5e:8", 64, ""), ("nanogpt.py:gpt2_medium", "tpu-v5e:16", 64, ""),
            ("nanogpt.py:gpt2_medium", "dgx-h100:1", 64, ""), ("bert.py:bert_large", "dgx-a100-40:1", 256, ""),
            ("unet.py:unet", "dgx-a100-40:2", 256, ""), ("maxtext_decoders.py:llama2_7b", "dgx-h100:4", 64, ""),
            ("maxtext_decoders.py:llama2_7b", "dgx-h100:4", 64, "zero(stage=3)"),
            ("maxtext_decoders.py:mixtral_8x7b", "dgx-h100:4", 64, ""), ("gptj.py:gptj_6b", "dgx-a100-80:2", 64, ""),
            ("nanogpt.py:gpt2_xl", "dgx-a100-40:1", 64, ""), ("siglip.py:siglip_b16", "tpu-v5e:4", 2048, ""),
            ("siglip.py:siglip_so400m", "tpu-v5e:8", 1024, ""), ("flax_examples.py:wmt_big", "dgx-a100-40:1", 256, ""),
            ("flax_examples.py:resnet50", "dgx-a100-40:1", 4096, ""),
        ]  # fmt: skip
    return tuple(found)


ROWS = _rows()

# One preset of each kind of device, and its devices a host.
_KINDS = {
    "tpu-v4": 4, "tpu-v5e": 8, "tpu-v5p": 4, "tpu-v6e": 8, "p3.16xlarge": 8, "dgx-a100-40": 8, "dgx-a100-80": 8,
    "dgx-h100": 8, "dgx-h200": 8, "dgx-b200": 8,
}  # fmt: skip

# Bytes of state of a parameter: itself and its gradient in float32, two moments of Adam.
_STATE_BYTES = 16.0


def every_row() -> Iterator[Row]:
    """Rows of every reference model of a size that people train on a few hosts, with its own batch."""
    import jax

    from meshwright import zoo
    from meshwright.cluster import load_cluster

    for name in zoo.names():
        leaves = jax.tree.leaves(zoo.build(name).example_state["params"])
        parameters = sum(math.prod(leaf.shape) for leaf in leaves)
        if not 0.95e9 <= parameters <= 80e9:
            continue
        for preset, devices in _KINDS.items():
            unit = devices if preset.startswith("tpu") else 1  # a slice is asked for by its chips
            memory = devices * load_cluster(f"{preset}:{unit}").device.memory_bytes
            hosts = 2 ** max(0, math.ceil(math.log2(2 * _STATE_BYTES * parameters / memory)))
            yield f"{name}+own", f"{preset}:{hosts * unit}", 0, ""


# A row is stopped after so long.
LATE_SECONDS = 600.0


def name_of(row: Row) -> str:
    """As `--only` matches it."""
    model, cluster, batch, preset = row
    return f"{model}/{cluster}/{batch}/{preset or 'planned'}"


def peak_bytes_of(text: str) -> float:
    """The bytes of a program's buffers in the device's main memory, by XLA's report of its buffer assignment."""
    found = 0.0
    for line in text.splitlines():
        if line.startswith("Used values"):
            break
        if allocation := re.match(r"allocation \d+: size (\d+)(.*)", line):
            size, kind = float(allocation[1]), allocation[2]
            elsewhere = re.search(r"color [1-9]", kind) or "thread-local" in kind or "constant" in kind
            found += 0.0 if elsewhere else size
    return found


def lowered_row(row: Row) -> tuple[Any, Any, Any]:
    """The planning of a row, its cluster and its program lowered for that."""
    from meshwright import zoo
    from meshwright.cluster import load_cluster
    from meshwright.compilers import target_devices
    from meshwright.planning.plan_for import plan_for
    from meshwright.program.effects import without_effects
    from meshwright.runtime.executable import executable
    from meshwright.targets import load_target
    from meshwright.zoo.registry import FAMILIES

    name, cluster_name, batch, held_to = row
    preset, _, microbatches = held_to.partition("@")
    model, *how = name.split("+")
    if model in zoo.names() and "own" not in how:
        family, config = next((one, one.CONFIGS[model]) for one in FAMILIES if model in one.CONFIGS)
        changes: dict[str, Any] = {"global_batch": batch, **({"scan": True} if "scan" in how else {})}
        built: zoo.Target = family.build(dataclasses.replace(config, **changes), remat="remat" in how)
        train_step, args = built.step, (built.example_state, built.example_batch)
    else:
        text = model if model in zoo.names() else f"{HERE / 'programs' / model}"
        loaded = load_target(text, global_batch=batch or None, attention=None, cluster=cluster_name)
        train_step, args = loaded.step, tuple(loaded.example_args)
    cluster = load_cluster(cluster_name)
    options: dict[str, Any] = {"preset": preset} if preset else {"stages": 1}
    if microbatches:
        options["microbatches"] = int(microbatches)
    found = plan_for(train_step, args, cluster=cluster, **options)
    step = executable(without_effects(found.program), found.plan, target_devices(cluster, found.plan))
    return found, cluster, step.lower()


def dumping(folder: Path) -> dict[str, Any]:
    """The options by which XLA writes reports of every module into a folder. Some programs have flags of their own, by
    which only some modules are written."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}


def run_row(row: Row, folder: Path) -> None:
    """Plans and compiles one row, XLA's reports in a folder, and prints what was found; ends the process."""
    from meshwright._jax.ahead import compile_ahead

    found, cluster, lowered = lowered_row(row)
    begun = time.perf_counter()
    errors: list[str] = []

    def compile_it() -> None:
        try:
            compile_ahead(lowered, dumping(folder))
        except Exception as error:  # shown as the row's failure
            errors.append(str(error)[:300])

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    while thread.is_alive() and not list(folder.glob("*memory-usage-report.txt")):
        time.sleep(0.2)
    time.sleep(0.5)  # until it is written whole
    texts = [path.read_text() for path in folder.glob("*buffer-assignment.txt")]
    (stage,) = found.plan.stages
    row_facts = {
        "predicted": stage.memory.total, "limit": cluster.device.usable_memory_bytes,
        "microbatches": found.plan.microbatches, "compile_seconds": time.perf_counter() - begun,
        **({"compiled": max(map(peak_bytes_of, texts))} if texts else {"failed": "no report"}),
        **({"failed": errors} if errors else {}),
    }  # fmt: skip
    print(json.dumps(row_facts), flush=True)
    os._exit(0)  # the compiler is still at work


def measured(row: Row, script: str = __file__) -> dict[str, Any]:
    """A row as a script prints it when asked for that row alone, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--row", json.dumps(row), "--folder", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LATE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {LATE_SECONDS:g} s"}
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {"failed": done.stderr.strip().splitlines()[-1:]}


def main() -> int:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or patterns of names, separated by semicolons")
    parser.add_argument("--every", action="store_true", help="every reference model on every kind of device")
    parser.add_argument("--platform", choices=("tpu", "gpu"), help="only rows of these devices")
    parser.add_argument("--record", type=Path, help="write the rows to this file")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        run_row(tuple(json.loads(asked.row)), asked.folder)
    known = json.loads(asked.record.read_text()) if asked.record and asked.record.exists() else {}
    for row in every_row() if asked.every else ROWS:
        name = name_of(row)
        platform = "tpu" if row[1].startswith("tpu") else "gpu"
        wanted = any(fnmatchcase(name, pattern) for pattern in asked.only.split(";"))
        if name in known or not wanted or asked.platform not in (None, platform):
            continue
        known[name] = measured(row)
        print(name, json.dumps(known[name])[:300], file=sys.stderr, flush=True)
        if asked.record:
            asked.record.write_text(json.dumps(known, indent=1))
    each = {name: row["predicted"] / row["compiled"] for name, row in known.items() if "compiled" in row}
    errors = sorted(abs(ratio - 1) for ratio in each.values())
    summary = {
        "rows": len(each),
        "median_error": statistics.median(errors) if errors else None,
        "error_90th": errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else None,
        "most_too_low": 1 - min(each.values()) if each else None,
    }
    print(json.dumps({"rows": known, "ratios": each, "peaks": summary}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
