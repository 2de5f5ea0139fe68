"""Models as names and shapes of parameters, without data: from a file, of a published model, or of a task."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eigengraft.errors import RecipeError, did_you_mean
from eigengraft.optimizers.recipe.loading import read_yaml
from eigengraft.optimizers.recipe.routing import ParamInfo, describe_model

from .base import Task


class Llama(NamedTuple):
    """The dimensions of a Llama.

    layers: number of transformer blocks.
    width: width of the model.
    hidden: width of the feed-forward layers.
    keys: width of the keys, and of the values, of all heads together.
    vocabulary: number of tokens.
    tied: True if the head and the embedding are one parameter.
    """

    layers: int
    width: int
    hidden: int
    keys: int
    vocabulary: int
    tied: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every parameter by its name in published checkpoints; the weight of a Linear is [outputs, inputs]."""
        d, f = self.width, self.hidden
        yield "model.embed_tokens.weight", (self.vocabulary, d)
        for layer in range(self.layers):
            block = f"model.layers.{layer}"
            for name, rows in (("q", d), ("k", self.keys), ("v", self.keys), ("o", d)):
                yield f"{block}.self_attn.{name}_proj.weight", (rows, d)
            for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
                yield f"{block}.mlp.{name}_proj.weight", shape
            for name in ("input", "post_attention"):
                yield f"{block}.{name}_layernorm.weight", (d,)
        yield "model.norm.weight", (d,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, d)


class GPT2(NamedTuple):
    """The dimensions of a GPT-2.

    layers: number of transformer blocks.
    width: width of the model; feed-forward layers are four times as wide.
    vocabulary: number of tokens.
    length: number of positions.
    """

    layers: int
    width: int
    vocabulary: int
    length: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every parameter by its name in published checkpoints; the weight of a Conv1D is [inputs, outputs]."""
        d = self.width
        yield "wte.weight", (self.vocabulary, d)
        yield "wpe.weight", (self.length, d)
        linears = (("attn.c_attn", d, 3 * d), ("attn.c_proj", d, d), ("mlp.c_fc", d, 4 * d), ("mlp.c_proj", 4 * d, d))
        for layer in range(self.layers):
            for name, inputs, outputs in linears:
                yield f"h.{layer}.{name}.weight", (inputs, outputs)
                yield f"h.{layer}.{name}.bias", (outputs,)
            yield from ((f"h.{layer}.{norm}.{name}", (d,)) for norm in ("ln_1", "ln_2") for name in ("weight", "bias"))
        yield from ((f"ln_f.{name}", (d,)) for name in ("weight", "bias"))


MODELS: Mapping[str, Llama | GPT2] = {
    "llama-1b": Llama(layers=16, width=2048, hidden=8192, keys=8 * 64, vocabulary=128256, tied=True),
    "llama-8b": Llama(layers=32, width=4096, hidden=14336, keys=8 * 128, vocabulary=128256),
    "llama-70b": Llama(layers=80, width=8192, hidden=28672, keys=8 * 128, vocabulary=128256),
    "gpt2": GPT2(layers=12, width=768, vocabulary=50257, length=1024),
}
"""Published models by name.

llama-8b and llama-70b: Llama 3, Grattafiori et al. 2024, table 3; keys and values have 8 heads of width 128.
llama-1b: the published configuration of Llama 3.2 1B, with 1.24e9 parameters.
gpt2: GPT-2 small, without a head.
"""


def parameters_of(model: str) -> Sequence[tuple[str, tuple[int, ...]] | ParamInfo]:
    """Return the trainable parameters of a model.

    model: a .json or .yaml file as in `read_shapes`, the name of a published model, or the kind of a task. Parameters
        of a task come with the types and roles of their modules, by which the routes of a recipe select them.

    Raises RecipeError if the name is unknown, or the file is invalid.
    """
    if Path(model).suffix in (".json", ".yaml", ".yml"):
        return read_shapes(Path(model))
    if model in MODELS:
        return list(MODELS[model].shapes())
    if model not in Task.members:
        known = [*MODELS, *Task.members]
        raise RecipeError(
            f"model: '{model}' is unknown{did_you_mean(model, known)}; known are {', '.join(known)}, and .json "
            "or .yaml files of names and shapes"
        )
    task = Task.members[model]()
    assert isinstance(task, Task)
    module = task.new_model(0)
    infos = describe_model(module)
    return [infos[id(parameter)] for parameter in module.parameters() if parameter.requires_grad]


def read_shapes(path: Path) -> Sequence[tuple[str, tuple[int, ...]]]:
    """Return names and shapes from a YAML or JSON file: {name: [8, 4]} or {name: 8x4}, or a list of [name, [8, 4]].

    Raises RecipeError if the file cannot be read, has no entries or two of one name, or an entry has another form.
    """
    data = read_yaml(path)
    rows = list(data.items()) if isinstance(data, Mapping) else data
    if not isinstance(rows, list) or not rows:
        raise RecipeError(f"{path}: must contain names and shapes, got {type(data).__name__}")
    found: dict[str, tuple[int, ...]] = {}
    for row in rows:
        if not isinstance(row, (list, tuple)) or len(row) != 2 or not isinstance(row[0], str):
            raise RecipeError(f"{path}: an entry must have a name and a shape, as [weight, 8x4], got {row!r}")
        if row[0] in found:
            raise RecipeError(f"{path}: each entry must have its own name, got '{row[0]}' again in {row!r}; rename it")
        found[row[0]] = _shape(row[1], f"{path}: {row[0]}")
    return list(found.items())


def _shape(given: Any, where: str) -> tuple[int, ...]:
    words = [word for word in given.split("x") if word] if isinstance(given, str) else given
    if not isinstance(words, list) or not all(re.fullmatch(r"\d+", str(word)) for word in words):
        raise RecipeError(f"{where}: a shape has the form 8x4, got {given!r}")
    return tuple(map(int, words))
