"""torch.optim optimizers as pure functions, so that the update is part of the captured graph.

A `torch.optim` instance is only read. Its class, or a parent class, selects a rule in `TABLE`; its parameter groups
supply the constants; its state, if it has stepped, supplies the initial values. The update

    new_param, new_state = update(optimizer, group, param, grad, state, step, lr)

has no side effects and consists of ATen operators and `tutti::adam`. Only `lr` and `step` vary between steps. Results
match torch to the last bit or two.

One file of `formulas` per optimizer family holds its formula and source. The modules there are imported here.
`register_optimizer` adds another optimizer; see docs/extend/optimizer.md.
"""

from importlib import import_module
from pkgutil import iter_modules

from tutti.tracing.optimizers import formulas
from tutti.tracing.optimizers.clipping import clip_scale as clip_scale
from tutti.tracing.optimizers.clipping import global_norm as global_norm
from tutti.tracing.optimizers.clipping import not_finite as not_finite
from tutti.tracing.optimizers.clipping import poisoned as poisoned
from tutti.tracing.optimizers.lookup import check as check
from tutti.tracing.optimizers.lookup import check_constants as check_constants
from tutti.tracing.optimizers.lookup import check_hooks as check_hooks
from tutti.tracing.optimizers.lookup import constants_of as constants_of
from tutti.tracing.optimizers.precision import rate_of as rate_of
from tutti.tracing.optimizers.states import counter_of as counter_of
from tutti.tracing.optimizers.states import initial_state as initial_state
from tutti.tracing.optimizers.states import state_of as state_of
from tutti.tracing.optimizers.states import states_of as states_of
from tutti.tracing.optimizers.states import step_count as step_count
from tutti.tracing.optimizers.states import update_counts as update_counts
from tutti.tracing.optimizers.table import NAMED as NAMED
from tutti.tracing.optimizers.table import TABLE as TABLE
from tutti.tracing.optimizers.table import register as register
from tutti.tracing.optimizers.table import register_optimizer as register_optimizer
from tutti.tracing.optimizers.updates import update as update

for _formula in iter_modules(formulas.__path__, f"{formulas.__name__}."):
    import_module(_formula.name)
