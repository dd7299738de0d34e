"""The walk of a parameter through `tutti.parallelize`, with the names of the code, which must exist."""

from __future__ import annotations

import ast

from generating.page import ROOT

PHASES = {
    "Capture": (
        ("api/parallelize.py", "parallelize", "collects the options and makes a `Step`, whose `__init__` is the rest"),
        ("tracing/batch.py", "FlatBatch", "flattens the example batch, and cuts it into microbatches"),
        ("tracing/capture_spec.py", "CaptureSpec.training", "captures the step of a microbatch"),
        ("tracing/capture.py", "capture", "makes a fake tensor for every input: `param:fc.weight`, its optimizer "
         "state `exp_avg:fc.weight`, the batch, the learning rate"),
        ("tracing/trace/attempts.py", "Attempts.traced", "runs forward, backward and update on them, until what the "
         "Python code reads is settled"),
        ("tracing/build.py", "build", "names nodes, fuses patterns, and pairs the parameter with its successor, the "
         "output of the same name"),
    ),
    "Plan": (
        ("sim/planning.py", "choose", "loads, looks up or searches a plan, on rank 0"),
        ("plan/planner.py", "Planner.named", "a named plan; `Search` in `plan/search/search.py` for `\"auto\"`"),
        ("plan/layouts/problem.py", "problem_of", "the factors of every operator, by its rule in `ops`"),
        ("plan/plan.py", "Plan.input_layout", "says how `param:fc.weight` is spread over the mesh"),
        ("lower/variants/vary.py", "vary", "applies what the plan changes in the graph: recomputation, copies of the "
         "batch, low precision"),
    ),
    "Place": (
        ("lower/parts/schedule_parts.py", "homes_of", "the pipeline stage that keeps each input"),
        ("exec/stores/tensor_store.py", "TensorStore.declare", "notes the layout of each stored tensor"),
        ("exec/stores/live.py", "Live.take", "copies each rank's part of the user's parameter, or shares it where a "
         "rank keeps it whole"),
    ),
    "Lower": (
        ("exec/executables.py", "Executables.executor", "keeps an executor for each computation and shape"),
        ("exec/executor.py", "Executor", "cuts the graph into parts of stages and microbatches"),
        ("lower/parts/cut.py", "cut", "the parts; `parts.schedule_parts.program_of` lowers one for one rank"),
        ("lower/shard.py", "shard", "replaces operators by local ones and collectives: a `Program`"),
        ("exec/kernels/levels.py", "prepare", "orders, fuses and compiles, by the level"),
        ("exec/kernels/codegen.py", "generate", "writes the Program as a Python generator that yields collectives"),
    ),
    "Run": (
        ("api/step.py", "Step.__call__", "flattens the batch once, and looks for changes that the user made"),
        ("api/step.py", "Step._run", "cuts the batch into microbatches; one whose rows do not divide stays whole"),
        ("exec/executables.py", "Executables.of_microbatches", "finds the executor by shapes and guards; a batch of "
         "another shape is captured, and `plan.planner.replan` keeps the layouts of the first plan"),
        ("exec/executor.py", "Executor.run", "lets every local device do the actions of the schedule"),
        ("exec/device.py", "Device.inputs", "takes the rank's part of `param:fc.weight` from the store"),
        ("exec/runtimes/runtime.py", "Distributed.run", "drives the generator; `Virtual` runs all ranks in turns"),
        ("lower/parts/gradient_sums.py", "add_to_sums", "makes a part add its gradient to the sum over microbatches, "
         "which `Device.act` divides before the update"),
        ("exec/device.py", "Device.replace", "puts the parameter's successor in its place"),
        ("exec/stores/live.py", "Live.stepped", "notes that the user's parameter is behind: it is filled when read"),
    ),
}  # fmt: skip


def _names(file: str) -> set[str]:
    """Functions, classes and methods of a module, by their qualified names."""
    tree = ast.parse((ROOT / "src/tutti" / file).read_text())
    names = {x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    return names | {f"{owner.name}.{x.name}" for owner in tree.body if isinstance(owner, ast.ClassDef)
                    for x in owner.body if isinstance(x, ast.FunctionDef)}  # fmt: skip


def walk() -> str:
    """The page's section. Raises KeyError for a name that the code does not have."""
    lines = ["\n## The walk of a parameter\n", "What happens to `fc.weight` between `tutti.parallelize` and a step, in "
             "order.\n"]  # fmt: skip
    for phase, places in PHASES.items():
        lines += [f"### {phase}\n", "| where | name | what it does |", "|---|---|---|"]
        for file, name, text in places:
            if name not in _names(file):
                raise KeyError(f"src/tutti/{file} has no {name}: correct docs/generating/walk.py")
            lines.append(f"| `{file}` | `{name}` | {text} |")
        lines.append("")
    return "\n".join(lines)
