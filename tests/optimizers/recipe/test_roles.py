"""Roles of parameters: re-creations of public models in small, and which of their layers are embeddings and heads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

from eigengraft import Optimizer, compose
from eigengraft.optimizers.models.composer import grouped, submodel
from eigengraft.optimizers.plan.plan import known
from eigengraft.optimizers.recipe.routing import ParamInfo, describe_model, describe_named

from ...refusals import refused

D = 16
"""Width of the models."""


def tree(parts: Any) -> nn.Module:
    """A module of nested parts: a mapping has these attributes, a list is a ModuleList, a tuple a Sequential."""
    if isinstance(parts, list):
        return nn.ModuleList(map(tree, parts))
    if isinstance(parts, tuple):
        return nn.Sequential(*map(tree, parts))
    if not isinstance(parts, dict):
        assert isinstance(parts, nn.Module)
        return parts
    made = nn.Module()
    for name, part in parts.items():
        if isinstance(part, nn.Parameter):
            made.register_parameter(name, part)
        else:
            made.add_module(name, tree(part))
    return made


def L(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def C(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, bias=False, **options)


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class Scale(nn.Module):
    """A norm of the user's that no name tells."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = P(*shape)


class Conv1D(nn.Module):
    """Hugging Face's, stored [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.weight = outputs, P(inputs, outputs)


class Telling(nn.Module):
    """A model with methods that return its head, as those of timm and Hugging Face."""

    def __init__(self, parts: dict[str, Any], **methods: str) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, tree(part))
        self.answers = methods

    def _answer(self, method: str) -> Any:
        answer = self.answers[method]  # raises KeyError where the model does not say
        found = tuple(self.get_submodule(path) for path in answer.split(","))
        return found if len(found) > 1 else found[0]

    def get_classifier(self) -> Any:
        return self._answer("get_classifier")

    def get_output_embeddings(self) -> Any:
        return self._answer("get_output_embeddings")

    def get_input_embeddings(self) -> Any:
        return self._answer("get_input_embeddings")


def attention(d: int = D) -> dict[str, Any]:
    return {"q_proj": L(d, d), "k_proj": L(d, d), "v_proj": L(d, d), "out_proj": L(d, d)}


def block(d: int = D) -> dict[str, Any]:
    return {"ln1": nn.LayerNorm(d), "attn": attention(d), "mlp": {"fc1": L(d, 4 * d), "fc2": L(4 * d, d)}}


def gpt_block(d: int = D) -> dict[str, Any]:
    inside = {"attn": {"c_attn": L(d, 3 * d), "c_proj": L(d, d)}, "mlp": {"c_fc": L(d, 4 * d), "c_proj": L(4 * d, d)}}
    return {"ln_1": nn.LayerNorm(d), **inside}


def timm_block(d: int = D) -> dict[str, Any]:
    inside = {"qkv": L(d, 3 * d), "proj": L(d, d)}
    return {"norm1": nn.LayerNorm(d), "attn": inside, "mlp": {"fc1": L(d, 4 * d), "fc2": L(4 * d, d)}}


def residual(inputs: int, outputs: int) -> dict[str, Any]:
    made = {"conv1": C(inputs, outputs), "bn1": nn.BatchNorm2d(outputs), "conv2": C(outputs, outputs)}
    return {**made, "downsample": (C(inputs, outputs, 1), nn.BatchNorm2d(outputs))}


def resnet(**head: Any) -> dict[str, Any]:
    return {"conv1": C(3, 8), "layer1": (residual(8, 8), residual(8, 8)), "layer2": (residual(8, D),), **head}


def tied(model: nn.Module, head: str, table: str) -> nn.Module:
    model.get_submodule(head).weight = model.get_submodule(table).weight
    return model


def transformed(model: nn.Module, change: Callable[[nn.Module], Any], *paths: str) -> nn.Module:
    for path in paths:
        change(model.get_submodule(path))
    return model


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def lora(inputs: int, outputs: int) -> dict[str, Any]:
    pair = {"lora_A": {"default": L(inputs, 2)}, "lora_B": {"default": L(2, outputs)}}
    return {"base_layer": frozen(L(inputs, outputs)), **pair}


def body() -> tuple[nn.Module, ...]:
    return L(D, 2 * D), nn.ReLU(), L(2 * D, D)


@dataclass(frozen=True)
class Case:
    """A model, and what is expected of it.

    make: builds it. heads, tables: parameters that are heads and embeddings. vectors: other parameters of two and more
    axes that are no matrices. All the rest with two and more axes is hidden.
    unclear: the last layer, where nothing decides whether it is a head.
    names: whether names and shapes alone give the same.
    """

    make: Callable[[], nn.Module]
    heads: str = ""
    tables: str = ""
    vectors: str = ""
    unclear: str = ""
    names: bool = True


CASES = {
    # images
    "LeNet": Case(
        lambda: tree({"c1": C(1, 6), "c2": C(6, D), "fc1": L(400, 120), "fc2": L(120, 84), "fc3": L(84, 10)}),
        "fc3.weight",
    ),
    "ResNet for CIFAR": Case(lambda: tree(resnet(linear=L(D, 10))), "linear.weight"),
    "torchvision ResNet": Case(lambda: tree(resnet(fc=L(D, 10))), "fc.weight"),
    "as many classes as channels": Case(lambda: tree(resnet(fc=L(D, 8))), "fc.weight"),
    "VGG": Case(
        lambda: tree({"features": (C(3, 8), nn.ReLU(), C(8, D)), "classifier": (L(D * 4, 32), L(32, 32), L(32, 10))}),
        "classifier.2.weight",
    ),
    "MobileNet": Case(
        lambda: tree({"features": ((C(3, 8), nn.BatchNorm2d(8)),), "classifier": (nn.Dropout(), L(8, 5))}),
        "classifier.1.weight",
    ),
    "SqueezeNet": Case(
        lambda: tree({"features": (C(3, D),), "classifier": (nn.Dropout(), C(D, 10, 1))}), "classifier.1.weight"
    ),
    "DenseNet": Case(
        lambda: tree({"features": {"conv0": C(3, 8), "l1": {"conv1": C(8, 4)}}, "classifier": L(12, 10)}),
        "classifier.weight",
    ),
    "torchvision ViT": Case(
        lambda: tree({"conv_proj": C(3, D, 4), "encoder": {"layers": [block(), block()]}, "heads": {"head": L(D, 10)}}),
        "heads.head.weight",
    ),
    "torchvision ViT, hidden layer in the head": Case(
        lambda: tree({"blocks": [block()], "heads": {"pre_logits": L(D, 32), "head": L(32, 10)}}), "heads.head.weight"
    ),
    "vit-pytorch": Case(
        lambda: tree(
            {"to_patch_embedding": (nn.LayerNorm(48), L(48, D)), "pos_embedding": P(1, 5, D), "cls_token": P(1, 1, D)}
            | {"layers": [[timm_block()["attn"], body()]], "mlp_head": L(D, 10)}
        ),
        "mlp_head.weight",
        "pos_embedding",
        "cls_token",
    ),
    "vit-pytorch, older": Case(
        lambda: tree({"layers": [block(), block()], "mlp_head": (nn.LayerNorm(D), L(D, 10))}), "mlp_head.1.weight"
    ),
    "timm ViT": Case(
        lambda: Telling(
            {"patch_embed": {"proj": C(3, D, 4)}, "blocks": (timm_block(), timm_block()), "head": L(D, 10)},
            get_classifier="head",
        ),
        "head.weight",
    ),
    "timm, distilled": Case(
        lambda: Telling(
            {"blocks": (timm_block(),), "head": L(D, 10), "head_dist": L(D, 10)}, get_classifier="head,head_dist"
        ),
        "head.weight head_dist.weight",
    ),
    "timm EfficientNet": Case(
        lambda: Telling(
            {"conv_stem": C(3, 8), "blocks": ((residual(8, 8),),), "conv_head": C(8, D, 1), "classifier": L(D, 10)},
            get_classifier="classifier",
        ),
        "classifier.weight",
    ),
    "timm EfficientNet without classes": Case(
        lambda: Telling(
            {
                "conv_stem": C(3, 8),
                "blocks": ((residual(8, 8),),),
                "conv_head": C(8, D, 1),
                "classifier": nn.Identity(),
            },
            get_classifier="classifier",
        ),
        names=False,
    ),
    "timm ResNet as the backbone of another model": Case(
        lambda: tree({"backbone": Telling(resnet(fc=L(D, 24)), get_classifier="fc"), "top": L(24, 10)}),
        "top.weight",
        names=False,
    ),
    "ConvNeXt V2": Case(
        lambda: tree(
            {"stem": C(3, D, 4), "stages": [{"dwconv": C(D, D, 7, groups=D), "grn": {"gamma": P(1, 1, 1, D)}}]}
            | {"head": L(D, 10)}
        ),
        "head.weight",
        vectors="stages.0.grn.gamma",
    ),
    "tables without a layer": Case(
        lambda: tree(
            {
                "pos": P(9, D),
                "register_tokens": P(4, D),
                "queries": P(4, D),
                "mixer": {"queries": L(D, D), "w_q": P(D, D)},
            }
            | {"head": L(D, 10)}
        ),
        "head.weight",
        "pos register_tokens queries",
    ),
    "Swin": Case(
        lambda: tree({"layers": [{"relative_position_bias_table": P(9, 2), **timm_block()}], "head": {"fc": L(D, 10)}}),
        "head.fc.weight",
        "layers.0.relative_position_bias_table",
    ),
    "U-Net": Case(
        lambda: tree(
            {"inc": {"double_conv": (C(3, 8), C(8, 8))}, "down1": {"conv": C(8, D)}}
            | {"up1": {"up": nn.ConvTranspose2d(D, 8, 2, bias=False), "conv": C(D, 8)}, "outc": {"conv": C(8, 2, 1)}}
        ),
        "outc.conv.weight",
    ),
    "DeepLab with an auxiliary classifier": Case(
        lambda: tree(
            {"backbone": resnet(), "classifier": (C(D, D), nn.ReLU(), C(D, 5, 1))}
            | {"aux_classifier": (C(8, 8), C(8, 5, 1))}
        ),
        "classifier.2.weight aux_classifier.1.weight",
    ),
    "Inception": Case(
        lambda: tree({**resnet(), "AuxLogits": {"conv0": C(8, 12), "fc": L(12, 10)}, "fc": L(D, 10)}),
        "fc.weight AuxLogits.fc.weight",
    ),
    "SSD": Case(
        lambda: tree(
            {"backbone": resnet(), "head": {"classification_head": {"module_list": [C(12, 20), C(D, 30), C(12, 30)]}}}
        ),
        " ".join(f"head.classification_head.module_list.{place}.weight" for place in range(3)),
        names=False,
    ),
    "Flux": Case(
        lambda: tree(
            {"x_embedder": L(48, D), "blocks": [timm_block(), timm_block()], "norm_out": {"linear": L(D, 2 * D)}}
            | {"proj_out": L(D, 48)}
        ),
        "proj_out.weight",
        names=False,
    ),
    "BART": Case(
        lambda: tied(
            tree(
                {"model": {"shared": nn.Embedding(50, D), "encoder": {"embed_positions": nn.Embedding(9, D)}}}
                | {"layernorm_embedding": nn.LayerNorm(D), "layers": [block(), block()], "lm_head": L(D, 50)}
            ),
            "lm_head",
            "model.shared",
        ),
        tables="model.shared.weight model.encoder.embed_positions.weight",
    ),
    "Faster R-CNN": Case(
        lambda: tree(
            {
                "backbone": resnet(),
                "rpn": {"head": {"conv": ((C(D, D),),), "cls_logits": C(D, 3, 1), "bbox_pred": C(D, 12, 1)}},
            }
            | {
                "roi_heads": {
                    "box_head": {"fc6": L(64, 32), "fc7": L(32, 32)},
                    "box_predictor": {"cls_score": L(32, 5), "bbox_pred": L(32, 20)},
                }
            }
        ),
        "rpn.head.cls_logits.weight rpn.head.bbox_pred.weight roi_heads.box_predictor.cls_score.weight "
        "roi_heads.box_predictor.bbox_pred.weight",
        names=False,
    ),
    # text
    "GPT-2": Case(
        lambda: tied(
            tree(
                {
                    "transformer": {
                        "wte": nn.Embedding(50, D),
                        "wpe": nn.Embedding(8, D),
                        "h": [gpt_block(), gpt_block()],
                    }
                }
                | {"lm_head": L(D, 50)}
            ),
            "lm_head",
            "transformer.wte",
        ),
        tables="transformer.wte.weight transformer.wpe.weight",
    ),
    "GPT-2 of Hugging Face": Case(
        lambda: Telling(
            {"wte": nn.Embedding(50, D), "h": [{"attn": {"c_attn": Conv1D(3 * D, D), "c_proj": Conv1D(D, D)}}] * 1}
            | {"vocabulary": L(D, 50)},
            get_output_embeddings="vocabulary",
        ),
        "vocabulary.weight",
        "wte.weight",
    ),
    "Llama": Case(
        lambda: tree(
            {"model": {"embed_tokens": nn.Embedding(50, D), "layers": [block(), block()]}, "lm_head": L(D, 50)}
        ),
        "lm_head.weight",
        "model.embed_tokens.weight",
    ),
    "torchtitan": Case(
        lambda: tree(
            {"tok_embeddings": nn.Embedding(50, D), "layers": {"0": block(), "1": block()}, "output": L(D, 50)}
        ),
        "output.weight",
        "tok_embeddings.weight",
    ),
    "a vocabulary as large as a hidden layer": Case(
        lambda: tree({"emb": nn.Embedding(4 * D, D), "blocks": [block(), block()], "to_vocabulary": L(D, 4 * D)}),
        "to_vocabulary.weight",
        "emb.weight",
        names=False,
    ),
    "a padded vocabulary": Case(
        lambda: tree({"emb": nn.Embedding(70, D), "blocks": [block(), block()], "to_vocabulary": L(D, 96)}),
        "to_vocabulary.weight",
        "emb.weight",
    ),
    "T5": Case(
        lambda: tree(
            {"shared": nn.Embedding(50, D), "encoder": {"block": [{"rel": nn.Embedding(4, 2), **attention()}] * 1}}
            | {"decoder": {"block": [attention(), attention()]}, "lm_head": L(D, 50)}
        ),
        "lm_head.weight",
        "shared.weight encoder.block.0.rel.weight",
        names=False,
    ),
    "BERT": Case(
        lambda: tied(
            tree(
                {
                    "bert": {
                        "embeddings": {"word_embeddings": nn.Embedding(50, D)},
                        "encoder": {"layer": [block(), block()]},
                    }
                }
                | {
                    "cls": {
                        "predictions": {"transform": {"dense": L(D, D)}, "decoder": L(D, 50)},
                        "seq_relationship": L(D, 2),
                    }
                }
            ),
            "cls.predictions.decoder",
            "bert.embeddings.word_embeddings",
        ),
        "cls.seq_relationship.weight",
        "bert.embeddings.word_embeddings.weight",
        names=False,
    ),
    "BERT, not tied": Case(
        lambda: tree(
            {"bert": {"embeddings": {"word_embeddings": nn.Embedding(50, D)}, "encoder": {"layer": [block(), block()]}}}
            | {
                "cls": {
                    "predictions": {"transform": {"dense": L(D, D)}, "decoder": L(D, 50)},
                    "seq_relationship": L(D, 2),
                }
            }
        ),
        "cls.predictions.decoder.weight cls.seq_relationship.weight",
        "bert.embeddings.word_embeddings.weight",
    ),
    "BERT without a head": Case(
        lambda: tree(
            {"embeddings": {"word_embeddings": nn.Embedding(50, D), "position_embeddings": nn.Embedding(D, D)}}
            | {"encoder": {"layer": [block(), block()]}, "pooler": {"dense": L(D, D)}}
        ),
        tables="embeddings.word_embeddings.weight embeddings.position_embeddings.weight",
        unclear="pooler.dense.weight",
    ),
    "BERT for classes": Case(
        lambda: tree({"bert": {"layer": [block(), block()], "pooler": {"dense": L(D, D)}}, "classifier": L(D, 3)}),
        "classifier.weight",
    ),
    "RoBERTa for classes": Case(
        lambda: tree({"layer": [block(), block()], "classifier": {"dense": L(D, D), "out_proj": L(D, 3)}}),
        "classifier.out_proj.weight",
    ),
    "RoBERTa": Case(
        lambda: tied(
            tree(
                {"embed": nn.Embedding(50, D), "layer": [block()], "lm_head": {"dense": L(D, D), "decoder": L(D, 50)}}
            ),
            "lm_head.decoder",
            "embed",
        ),
        tables="embed.weight",
    ),
    "GPT-NeoX": Case(
        lambda: tree(
            {
                "gpt_neox": {
                    "embed_in": Telling({"table": Scale(50, D)}, get_input_embeddings="table"),
                    "layers": [block(), block()],
                }
            }
            | {"embed_out": L(D, 50)}
        ),
        "embed_out.weight",
        "gpt_neox.embed_in.table.weight",
        names=False,
    ),
    "questions": Case(lambda: tree({"layers": [block(), block()], "qa_outputs": L(D, 2)}), "qa_outputs.weight"),
    "generator of nn.Transformer": Case(
        lambda: tree(
            {
                "embed": nn.Embedding(50, D),
                "transformer": nn.Transformer(D, 2, 2, 2, 32, batch_first=True),
                "generator": {"proj": L(D, 50)},
            }
        ),
        "generator.proj.weight",
        "embed.weight",
        names=False,
    ),
    "torch's word language model": Case(
        lambda: tree({"encoder": nn.Embedding(50, D), "rnn": nn.LSTM(D, D), "decoder": L(D, 50)}),
        "decoder.weight",
        "encoder.weight",
        names=False,
    ),
    "tagger": Case(
        lambda: tree({"word_embeddings": nn.Embedding(50, D), "lstm": nn.LSTM(D, 12), "hidden2tag": L(12, 5)}),
        "hidden2tag.weight",
        "word_embeddings.weight",
        names=False,
    ),
    "an LSTM alone": Case(lambda: nn.LSTM(D, D)),
    "attention alone": Case(lambda: nn.MultiheadAttention(D, 2, bias=False)),
    "a layer of torch's transformer": Case(lambda: nn.TransformerEncoderLayer(D, 2, 32), unclear="linear2.weight"),
    "an encoder of torch's transformer": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32), 2, enable_nested_tensor=False)
    ),
    "heads of attention in a list": Case(
        lambda: tree(
            {
                "table": nn.Embedding(50, D),
                "sa_heads": {"heads": [{"key": L(D, 4), "value": L(D, 4)}] * 1},
                "lm_head": L(D, 50),
            }
        ),
        "lm_head.weight",
        "table.weight",
        names=False,
    ),
    "experts": Case(
        lambda: tree(
            {
                "embed": nn.Embedding(50, D),
                "layers": [{"experts": P(4, D, 32), "down": P(4, 32, D), "router": L(D, 4)}] * 1,
            }
            | {"lm_head": L(D, 50)}
        ),
        "lm_head.weight",
        "embed.weight",
    ),
    "adaptive softmax": Case(
        lambda: tree(
            {
                "emb": nn.Embedding(50, D),
                "layers": [block(), block()],
                "loss": nn.AdaptiveLogSoftmaxWithLoss(D, 50, [10]),
            }
        ),
        "loss.head.weight loss.tail.0.1.weight",
        "emb.weight",
        names=False,
    ),
    "early exits": Case(
        lambda: tree({"layers": [{"mlp": body(), "classifier": L(D, 5)}, {"mlp": body(), "classifier": L(D, 5)}]}),
        "layers.0.classifier.weight layers.1.classifier.weight",
    ),
    # adapters, parametrizations, old hooks
    "LoRA": Case(
        lambda: tree(
            {
                "base_model": {
                    "model": {
                        "model": {"embed_tokens": frozen(nn.Embedding(50, D)), "layers": [{"q_proj": lora(D, D)}] * 1},
                        "lm_head": lora(D, 50),
                    }
                }
            }
        ),
        "base_model.model.lm_head.base_layer.weight",
        "base_model.model.model.embed_tokens.weight",
    ),
    "a copy of the head of peft": Case(
        lambda: tree(
            {
                "base_model": {
                    "model": {
                        "layers": [block(), block()],
                        "score": {"original_module": frozen(L(D, 3)), "modules_to_save": {"default": L(D, 3)}},
                    }
                }
            }
        ),
        "base_model.model.score.original_module.weight base_model.model.score.modules_to_save.default.weight",
    ),
    "weight_norm everywhere": Case(
        lambda: transformed(
            tree({"table": nn.Embedding(50, D), "up": L(D, 32), "down": L(32, D), "to_vocabulary": L(D, 50)}),
            parametrizations.weight_norm,
            "table",
            "up",
            "to_vocabulary",
        ),
        "to_vocabulary.parametrizations.weight.original1",
        "table.parametrizations.weight.original1",
        "table.parametrizations.weight.original0 up.parametrizations.weight.original0 "
        "to_vocabulary.parametrizations.weight.original0",
        names=False,
    ),
    "spectral_norm everywhere": Case(
        lambda: transformed(
            tree({"conv": C(3, 8), "main": (L(D, 32), L(32, D)), "lm_head": L(D, 50)}),
            parametrizations.spectral_norm,
            "conv",
            "main.0",
            "lm_head",
        ),
        "lm_head.parametrizations.weight.original",
    ),
    "old weight_norm": Case(
        lambda: transformed(
            tree({"conv": C(3, 8), "up": L(D, 32), "head": L(32, 5)}), old_weight_norm, "conv", "up", "head"
        ),
        "head.weight_v",
        vectors="conv.weight_g up.weight_g head.weight_g",
    ),
    "old spectral_norm": Case(
        lambda: transformed(
            tree({"up": L(D, 32), "down": L(32, 8), "head": L(8, 5)}), nn.utils.spectral_norm, "up", "head"
        ),
        "head.weight_orig",
    ),
    # networks of other kinds
    "a Sequential": Case(lambda: tree((L(D, 32), nn.ReLU(), L(32, 10))), "2.weight", names=False),
    "a Sequential of equal layers": Case(lambda: tree((L(D, D), L(D, D), L(D, D))), "2.weight", names=False),
    "a Sequential of Sequentials": Case(
        lambda: tree(((L(D, 32), nn.ReLU()), (L(32, 32), nn.ReLU()), (L(32, 10),))), "2.0.weight", names=False
    ),
    "one Linear": Case(lambda: L(D, 10)),
    "a wrapper of a Sequential": Case(
        lambda: tree({"model": {"net": (L(D, 32), L(32, 10))}}), "model.net.1.weight", names=False
    ),
    "equal layers": Case(lambda: tree({"a": L(D, D), "b": L(D, D), "c": L(D, D)}), unclear="c.weight"),
    "layers in a list": Case(lambda: tree({"layers": [L(2, D), L(D, D), L(D, 1)]}), "layers.2.weight", names=False),
    "blocks alone": Case(lambda: tree({"blocks": [block(), block()]})),
    "stages of convolutions": Case(
        lambda: tree([{"conv": C(3, 8)}, {"conv": C(8, 12)}, {"conv": C(12, D)}]), unclear="2.conv.weight"
    ),
    "autoencoder": Case(
        lambda: tree({"encoder": (L(48, 32), nn.ReLU(), L(32, 8)), "decoder": (L(8, 32), nn.ReLU(), L(32, 48))}),
        "decoder.2.weight",
    ),
    "variational autoencoder": Case(
        lambda: tree({"fc1": L(48, 32), "fc21": L(32, 8), "fc22": L(32, 8), "fc3": L(8, 32), "fc4": L(32, 48)}),
        "fc4.weight",
        names=False,
    ),
    "masked autoencoder": Case(
        lambda: tree(
            {"patch_embed": {"proj": C(3, D, 4)}, "blocks": [block(), block()], "decoder_embed": L(D, 12)}
            | {"decoder_blocks": [block(12), block(12)], "decoder_pred": L(12, D)}
        ),
        "decoder_pred.weight",
        names=False,
    ),
    "actor and critic": Case(
        lambda: tree(
            {"critic": (L(4, D), nn.Tanh(), L(D, D), L(D, 1)), "actor": (L(4, D), nn.Tanh(), L(D, D), L(D, 3))}
        ),
        "critic.3.weight actor.3.weight",
        names=False,
    ),
    "policy and value": Case(
        lambda: tree({"l1": L(4, D), "l2": L(D, 32), "pi": L(32, 3), "v": L(32, 5)}), "pi.weight v.weight", names=False
    ),
    "two towers": Case(
        lambda: tree({"user": (L(30, 32), nn.ReLU(), L(32, D)), "item": (L(20, 24), nn.ReLU(), L(24, D))}),
        "user.2.weight item.2.weight",
        names=False,
    ),
    "two tasks, ModuleList": Case(
        lambda: tree({"b": body(), "heads": [L(D, 10), L(D, 5)]}), "heads.0.weight heads.1.weight"
    ),
    "two tasks, ModuleDict": Case(
        lambda: tree({"b": body(), "heads": {"a": L(D, 10), "b": (nn.LayerNorm(D), L(D, 5))}}),
        "heads.a.weight heads.b.1.weight",
    ),
    "DETR": Case(
        lambda: tree(
            {"transformer": {"layers": [block(), block()]}, "class_head": L(D, 5), "query_embed": nn.Embedding(7, D)}
            | {"bbox_head": {"layers": [L(D, D), L(D, D), L(D, 4)]}}
        ),
        "class_head.weight bbox_head.layers.2.weight",
        "query_embed.weight",
    ),
    "diffusers": Case(
        lambda: tree(
            {"conv_in": C(4, 8), "time_embedding": {"linear_1": L(8, D), "linear_2": L(D, D)}}
            | {"down_blocks": [{"resnets": [{"conv1": C(8, 8), "time_emb_proj": L(D, 8)}]}], "conv_out": C(8, 4)}
        ),
        "conv_out.weight",
    ),
    "DiT": Case(
        lambda: tree(
            {"x_embedder": {"proj": C(4, D, 2)}, "blocks": [timm_block(), timm_block()]}
            | {"final_layer": {"linear": L(D, 24), "adaLN_modulation": (nn.SiLU(), L(D, 2 * D))}}
        ),
        "final_layer.linear.weight",
    ),
    "generator of a GAN": Case(
        lambda: tree({"l1": (L(20, 64),), "conv_blocks": (nn.BatchNorm2d(4), C(4, 8), C(8, 12), C(12, 3), nn.Tanh())}),
        "conv_blocks.3.weight",
        names=False,
    ),
    "CLIP": Case(
        lambda: tree(
            {"vision_model": {"layers": [block(), block()]}, "text_model": {"layers": [block(12), block(12)]}}
            | {"visual_projection": L(D, 12), "text_projection": L(12, 12)}
        ),
        "visual_projection.weight text_projection.weight",
    ),
    # names that only look special
    "a projection of the inputs called proj": Case(
        lambda: tree({"proj": L(48, D), "blocks": [block(), block()], "head": L(D, 10)}), "head.weight"
    ),
    "a first layer called fc": Case(
        lambda: tree({"fc": L(48, D), "up": L(D, 32), "fc_out": L(32, 10)}), "fc_out.weight"
    ),
    "layers called ln1, embed and bn": Case(
        lambda: tree({"embed": L(48, D), "ln1": L(D, 32), "bn": L(32, D), "head": L(D, 10)}), "head.weight", names=False
    ),
    "norms by structure": Case(
        lambda: tree({"a": L(D, 32), "scale": Scale(1, 32, 1, 1), "planes": nn.LayerNorm((3, 4)), "head": L(32, 10)}),
        "head.weight",
        vectors="scale.weight planes.weight planes.bias",
        names=False,
    ),
}
"""Public models in small, with the attributes that their programs have."""


def old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module)


def split(text: str) -> set[str]:
    return set(text.split())


def require_roles(case: Case, infos: list[ParamInfo]) -> None:
    found = {info.name: info for info in infos}
    expected = {"head": split(case.heads), "embedding": split(case.tables)}
    for role, names in expected.items():
        assert {name for name, info in found.items() if info.role == role} == names, role
    special = expected["head"] | expected["embedding"] | split(case.vectors)
    matrices = {name for name, info in found.items() if len(info.shape) > 1 and info.role != "bias"}
    assert {name for name, info in found.items() if info.role == "hidden"} == matrices - special


@pytest.mark.parametrize("model", CASES)
def test_roles_of_public_models(model: str) -> None:
    case = CASES[model]
    infos = list(describe_model(case.make()).values())
    require_roles(case, infos)
    assert [info.name for info in infos if info.unclear] == ([case.unclear] if case.unclear else [])


@pytest.mark.parametrize("model", [name for name, case in CASES.items() if case.names])
def test_names_and_shapes_give_the_same_roles(model: str) -> None:
    """Where no module, no order of calls and no tie is needed; a plan of names and shapes agrees with an optimizer."""
    case = CASES[model]
    named = list(case.make().named_parameters())
    infos = list(describe_named(named).values())
    require_roles(case, infos)
    assert [info.role for info in known([(name, tuple(p.shape)) for name, p in named])] == [i.role for i in infos]


class Held(nn.Module):
    """A wrapper that keeps a model in the attribute of that name."""

    def __init__(self, attribute: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(attribute, model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data parallel": lambda model: Held("module", model),
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value,arg-type]
    "checkpointed": checkpoint_wrapper,
    "fsdp": lambda model: Held("_fsdp_wrapped_module", model),
    "peft": lambda model: Held("base_model", Held("model", model)),
    "lightning": lambda model: Held("model", model),
    "meta": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", ["LeNet", "timm ViT", "actor and critic", "equal layers", "weight_norm everywhere"])
def test_wrappers_and_devices_change_no_role(model: str, wrapper: str) -> None:
    plain, wrapped = (
        describe_model(made).values() for made in (CASES[model].make(), WRAPPERS[wrapper](CASES[model].make()))
    )
    assert [(info.role, info.unclear) for info in wrapped] == [(info.role, info.unclear) for info in plain]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(2, 4))])
def test_modules_of_torchscript_have_the_roles_of_their_source(compiled: Callable[[nn.Module], nn.Module]) -> None:
    source = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    model = compiled(source)
    tables = [compose("muon", one).routing_table() for one in (source, model)]
    own, scripted = ([(row.name, row.route) for row in table] for table in tables)
    assert own == scripted
    compose("schedule_free_adamw", model)
    optimizer = compose("newton_muon", model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with refused(ValueError, "activation_gram", "0.weight"):  # compiled code calls no hooks
        optimizer.step()


class Doubled(nn.Module):
    """A parametrization of a user's, with a matrix of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = P(width, width)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight @ self.mix


def test_parametrizations_keep_role_module_view_and_matrix_of_the_layer() -> None:
    """This holds for a user's parametrization too. Routes match the layer by its class, and views recognize it."""
    model = tree({"emb": nn.Embedding(50, 8), "attn": attention(8), "conv": C(3, 4), "lm_head": L(8, 50)})
    model.attn.num_heads = 2
    for path, parametrization in {
        "emb": Doubled(8),
        "attn.q_proj": Doubled(8),
        "conv": nn.Identity(),
        "lm_head": Doubled(8),
    }.items():
        parametrize.register_parametrization(model.get_submodule(path), "weight", parametrization)
    infos = {info.name: info for info in describe_model(model).values()}
    roles = {name: info.role for name, info in infos.items()}
    start = "parametrizations.weight"
    assert roles[f"emb.{start}.original"] == "embedding" and roles[f"lm_head.{start}.original"] == "head"
    assert roles[f"emb.{start}.0.mix"] == roles[f"lm_head.{start}.0.mix"] == roles[f"conv.{start}.original"] == "hidden"
    assert infos[f"conv.{start}.original"].facts.convolution is True
    linears = {name for name, info in infos.items() if "Linear" in info.modules}
    assert linears == {
        f"attn.q_proj.{start}.original",
        *(f"attn.{n}.weight" for n in ("k_proj", "v_proj", "out_proj")),
        f"lm_head.{start}.original",
    }
    rows = {row.name: row.view for row in compose("muon", model, overrides=["view=modules"]).routing_table()}
    assert (
        rows[f"attn.q_proj.{start}.original"].startswith("2 of 4x8: ")
        == rows["attn.k_proj.weight"].startswith("2 of 4x8: ")
        is True
    )


def test_a_method_that_raises_says_nothing() -> None:
    model = Telling({"blocks": [block(), block()], "top": L(D, 5)})
    assert [info.name for info in describe_model(model).values() if info.role == "head"] == ["top.weight"]


def heads_of(optimizer: Optimizer) -> dict[str, str]:
    return {
        row.name: row.reason for row in optimizer.routing_table() if row.route == "routes.adam" and len(row.shape) > 1
    }


def test_the_table_and_the_printed_optimizer_say_which_layer_is_the_head_and_why() -> None:
    optimizer = compose("muon", CASES["LeNet"].make())
    assert heads_of(optimizer) == {"fc3.weight": "last of numbered layers"}
    assert "output heads: fc3.weight (last of numbered layers)" in repr(optimizer)
    assert "output heads" not in repr(compose("adamw", CASES["LeNet"].make()))


def warned(make: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make()
    return [str(one.message) for one in found if issubclass(one.category, UserWarning) and "head" in str(one.message)]


def test_a_last_layer_that_may_be_a_head_is_warned_of_once_by_name() -> None:
    make = CASES["equal layers"].make
    for given in (make, lambda: grouped(make(), None)):
        (message,) = warned(lambda given=given: compose("muon", given()))  # type: ignore[misc]
        assert message.startswith("c.weight: ") and r"^c\.weight$" in message
    optimizer = compose("muon", make())
    row = optimizer.routing_table()[-1]
    assert row.route == "" and "perhaps an output head" in row.reason
    assert "output heads: none found, perhaps c.weight" in repr(optimizer)


NAMES = ["out", "proj", "decoder", "to_logits", "final", "readout", "predictor", "unembed", "cls", "fc_out"]


@pytest.mark.parametrize("name", [*NAMES, "output_layer", "anything"])
@pytest.mark.parametrize("classes", [50, 10, 1])
def test_the_layer_behind_all_blocks_is_the_head_under_any_name(name: str, classes: int) -> None:
    """50 are the rows of the embedding. The last layer of a Sequential is a head too."""
    for inside in (L(D, classes), (nn.LayerNorm(D), L(D, classes))):
        model = tree({"embedding": nn.Embedding(50, D), "layers": [block(), block()], name: inside})
        optimizer = compose("muon", model)
        (head,) = set(heads_of(optimizer)) - {"embedding.weight"}
        assert head.startswith(name) and not warned(lambda model=model: compose("muon", model))  # type: ignore[misc]
        assert f"output heads: {head} (" in repr(optimizer)


def last_frozen() -> nn.Module:
    model = CASES["equal layers"].make()
    frozen(model.get_submodule("c"))
    return model


def adapted() -> nn.Module:
    return tree({"a": lora(D, D), "b": lora(D, D), "c": lora(D, D)})


QUIET: dict[str, Callable[[], Any]] = {
    "names alone": lambda: Optimizer(CASES["equal layers"].make().named_parameters(), "muon"),
    "no route for heads": lambda: compose("adamw", CASES["equal layers"].make()),
    "routes: []": lambda: compose("muon", CASES["equal layers"].make(), overrides={"routes": []}),
    "a route of the user's": lambda: compose(
        {"base": "muon", "routes": [{"name": "top", "match": {"name": "^c"}, "update": "sign"}, "default"]},
        CASES["equal layers"].make(),
    ),
    "frozen": lambda: compose("muon", last_frozen()),
    "adapters": lambda: compose("muon", adapted()),
    "a stage of a pipeline": lambda: compose(
        "muon", submodel(tree({"a": L(D, D), "b": L(D, D)}), tree({"a": L(D, D), "b": L(D, D), "c": L(D, D)}))
    ),
    **{
        model: lambda model=model: compose("muon", CASES[model].make())  # type: ignore[misc]
        for model in ("GPT-2", "RoBERTa", "blocks alone", "one Linear", "a Sequential", "LeNet", "an LSTM alone")
    },
}


@pytest.mark.parametrize("case", QUIET)
def test_a_head_that_is_known_tied_or_frozen_gives_no_warning(case: str) -> None:
    assert warned(QUIET[case]) == []


def test_a_head_that_the_model_returns_or_a_route_takes_is_no_longer_in_doubt() -> None:
    parts = {"a": L(D, D), "b": L(D, D), "c": L(D, D)}
    model = Telling(parts, get_output_embeddings="c")
    assert warned(lambda: compose("muon", model)) == []
    assert heads_of(compose("muon", model)) == {"c.weight": "output head by get_output_embeddings"}
    assert warned(lambda: compose("muon", Telling({**parts, "none": nn.Identity()}, get_classifier="none"))) == []


def test_routes_of_the_user_come_before_roles() -> None:
    recipe = {
        "base": "muon",
        "routes": [{"name": "mine", "match": {"name": r"fc3\.weight"}, "update": "sign"}, "default"],
    }
    rows = {row.name: row.route for row in compose(recipe, CASES["LeNet"].make()).routing_table()}
    assert rows["fc3.weight"] == "routes.mine" and rows["fc2.weight"] == ""


def test_lora_factors_of_one_row_stay_factors() -> None:
    """Rank 1: `[1, n]` is a factor of a product, and no vector."""
    model = tree(
        {
            "lora_A": L(D, 1),
            "lora_B": L(1, D),
            "embed": {"lora_embedding_A": {"x": P(1, 9)}, "lora_embedding_B": {"x": P(D, 1)}},
        }
    )
    assert {info.role for info in describe_model(model).values()} == {"hidden"}
