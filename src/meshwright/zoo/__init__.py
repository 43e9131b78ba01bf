"""Reference models in the shapes the literature uses, as pure functions over dict pytrees.

`build(name)` gives a `Target`: a training step, its abstract state and batch, its FLOPs and its parameter count.
"""

from .bert import bert_layers as bert_layers
from .perceptron import mlp as mlp
from .registry import Entry as Entry, build as build, entries as entries, names as names, settings as settings
from .train import Model as Model, Target as Target, make_target as make_target
