"""Lightning fits, validates, saves and resumes recipes, at the right iterate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning")

from eigengraft import compose  # noqa: E402
from eigengraft.hosts.lightning import AVERAGED, AveragedIterates  # noqa: E402

from ..refusals import warned  # noqa: E402
from .models import Net, batch, same, values  # noqa: E402


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, recipe: str, lr: float = 1e-2) -> None:
        super().__init__()
        self.net, self.recipe, self.lr = Net(), recipe, lr
        self.validated: list[list[torch.Tensor]] = []

    def training_step(self, given: Any, index: int) -> Any:
        return nn.functional.cross_entropy(self.net(given[0]), given[1])

    def validation_step(self, given: Any, index: int) -> None:
        self.validated.append(values(self.net))

    def configure_optimizers(self) -> Any:
        optimizer = compose(self.recipe, self.net, lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class Evaluated(Module):
    def validation_step(self, given: Any, index: int) -> None:
        self.net(given[0])


def data() -> Any:
    sets = torch.utils.data.TensorDataset(*(torch.cat(both) for both in zip(*map(batch, range(8)), strict=True)))
    return torch.utils.data.DataLoader(sets, batch_size=8)


def trainer(folder: Path, *callbacks: Any, **changes: Any) -> Any:
    quiet = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
    chosen = {"accelerator": "cpu", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2}
    return lightning.Trainer(
        default_root_dir=folder, callbacks=[AveragedIterates(), *callbacks], **{**quiet, **chosen, **changes}
    )


@pytest.mark.parametrize("recipe", ["soap_fitted", "muon_8bit", "schedule_free_adamw"])
def test_a_run_resumes_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
    whole = Module(recipe)
    trainer(tmp_path, saving).fit(whole, data(), data())
    saved = sorted(tmp_path.glob("*.ckpt"))
    again = Module(recipe)
    trainer(tmp_path).fit(again, data(), data(), ckpt_path=saved[0], weights_only=False)
    assert same(values(whole), values(again)) and not same(values(whole), values(Module(recipe)))
    assert (AVERAGED in torch.load(saved[0], weights_only=False)) == (recipe == "schedule_free_adamw")


def test_validation_and_checkpoints_see_the_averaged_iterate(tmp_path: Path) -> None:
    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path)
    module = Module("schedule_free_adamw")
    own = trainer(tmp_path, saving, max_epochs=1, num_sanity_val_steps=0)
    own.fit(module, data(), data())
    trained = values(module.net)
    own.optimizers[0].eval()
    averaged = values(module.net)
    own.optimizers[0].train()
    assert not same(trained, averaged) and same(values(module.net), trained)
    assert all(same(seen, averaged) for seen in module.validated)
    saved = torch.load(next(tmp_path.glob("*.ckpt")), weights_only=False)
    assert same(saved[AVERAGED].values(), averaged) and same(saved["state_dict"].values(), trained)


def test_without_the_callback_one_warning_is_given(tmp_path: Path) -> None:
    module = Evaluated("schedule_free_adamw")
    own = trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=False)
    own.callbacks = [callback for callback in own.callbacks if not isinstance(callback, AveragedIterates)]
    with warned(UserWarning, "optimizer.eval"):
        own.fit(module, data(), data())


def test_the_learning_rate_finder_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    module, plain = Module("soap_fitted"), Module("soap_fitted")
    own = trainer(tmp_path, accumulate_grad_batches=1, enable_checkpointing=False)
    found = lightning.pytorch.tuner.Tuner(own).lr_find(module, data(), num_training=12, update_attr=False)
    assert len(found.results["lr"]) > 2 and same(values(module), values(plain))
    trainer(tmp_path, enable_checkpointing=False).fit(module, data())
    trainer(tmp_path, enable_checkpointing=False).fit(plain, data())
    assert same(values(module), values(plain))
