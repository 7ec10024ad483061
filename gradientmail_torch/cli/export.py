"""``gradientmail export``: the run's parameters as a file that needs neither the mailbox nor this package.

Loads torch when it is called.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradientmail_torch.errors import ConfigError, CorruptObject, RunMismatch
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Format = Literal["safetensors", "state_dict", "lightning"]
_ENDINGS: dict[Format, tuple[str, ...]] = {
    "safetensors": (".safetensors",),
    "state_dict": (".pt", ".pth", ".bin"),
    "lightning": (".ckpt",),
}
FORMATS: dict[str, Format] = {ending: form for form, endings in _ENDINGS.items() for ending in endings}
"""By the ending of the file's name."""
DTYPES = ("model", "fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: str
    form: Format
    tensors: int
    versions: tuple[int, ...]
    """Of each fragment; the run may have gone on since."""
    from_template: int
    """Tensors that the run does not hold, taken from the template."""


def export(
    mailbox: Mailbox,
    out: Path,
    *,
    form: Format | None = None,
    dtype: str = "model",
    template: Path | None = None,
    trusted: bool = False,
    hparams: str | None = None,
) -> Exported:
    """Write the newest committed value of every fragment to ``out``.

    Args:
        form: by the ending of ``out`` unless given.
        dtype: ``model``: the types of the founder's model.
        template: a checkpoint or state_dict of the same model, for what does not travel: frozen parameters, tied
            names, hyper-parameters.
        trusted: whether ``template`` may hold any Python object; it is unpickled then.
        hparams: the model's arguments as JSON, for ``load_from_checkpoint``.
    """
    form = form or FORMATS.get(out.suffix)
    if form is None:
        raise ConfigError(f"what shall {out.name!r} be? Name it *.safetensors, *.pt or *.ckpt, or give --format")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    arguments = _arguments(hparams)
    tensors, versions = _merged(mailbox, dtype)
    base = _template(template, trusted) if template else {}
    state = _complete(tensors, base.get("state_dict", base) if base else {})
    out.parent.mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        _save_safetensors(state, out, {"mailbox": repr(mailbox), "versions": json.dumps(versions), "format": "pt"})
    else:
        _save_pickle(state if form == "state_dict" else _checkpoint(state, base, arguments), out)
    return Exported(path=str(out), form=form, tensors=len(state), versions=versions, from_template=len(state.keys() - tensors.keys()))


def _merged(mailbox: Mailbox, dtype: str) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    import torch

    from gradientmail_torch.session.run import Run

    run = Run.open(mailbox)
    if run is None:
        raise RunMismatch(f"{mailbox!r} holds no run: a Session founds one. Is the URL, with its prefix, that of the run?")
    chosen = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    tensors: dict[str, Tensor] = {}
    versions = []
    for index, specs in enumerate(run.layout):
        commit, values = run.newest(index)
        versions.append(commit.version if commit else 0)
        for spec, value in zip(specs, values, strict=True):
            own = _type_of(spec)
            wanted = chosen if chosen is not None and spec.kind == "parameter" else own
            if spec.complex:
                tensors[spec.name] = torch.view_as_complex(value).to(own)
            else:
                tensors[spec.name] = value.to(wanted) if spec.floating else value
    return tensors, tuple(versions)


def _type_of(spec: TensorSpec) -> torch.dtype:
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or (spec.complex and spec.shape[-1:] != (2,)):
        raise CorruptObject(
            f"the run's manifest says that tensor {spec.name!r} is {spec.dtype!r} of shape {spec.shape}: there is none such"
        )
    return dtype


def _template(path: Path, trusted: bool) -> dict[str, Any]:
    import torch

    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    try:
        found = torch.load(path, map_location="cpu", weights_only=not trusted)
    except FileNotFoundError:
        raise ConfigError(f"there is no template {str(path)!r}") from None
    except Exception as error:  # whatever the unpickler meets
        raise ConfigError(
            f"the template {str(path)!r} cannot be read: {str(error)[:300]}. If you trust it, add --trust-template: it is unpickled then"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"the template {str(path)!r} holds a {type(found).__name__}, not a checkpoint or state_dict")
    return found


def _complete(tensors: dict[str, Tensor], template: dict[str, Tensor]) -> dict[str, Tensor]:
    """The run's tensors in the template's order, with what the run lacks; tied names follow the one that travelled."""
    import torch

    from gradientmail_torch.algorithms.model_tensors import plain_name

    there = {plain_name(name): value for name, value in template.items()}
    missing = sorted(tensors.keys() - there.keys()) if template else []
    if missing:
        raise ConfigError(f"the template is of another model: it lacks {missing[0]!r}, which the run trains")
    for name in tensors.keys() & there.keys():
        if (theirs := tuple(getattr(there[name], "shape", ()))) != (ours := tuple(tensors[name].shape)):
            raise ConfigError(f"the template is of another model: {name!r} has shape {theirs} there and {ours} in the run")
    merged_at = {_place(there[name]): name for name in tensors if name in there}
    state: dict[str, Tensor] = {}
    for name, value in template.items():
        if (plain := plain_name(name)) in tensors:
            state[name] = tensors[plain]
        elif isinstance(value, torch.Tensor):
            state[name] = tensors[merged_at[_place(value)]] if _place(value) in merged_at else value
    return state or tensors


def _place(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """The same for names of one tensor."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape)


def _arguments(hparams: str | None) -> dict[str, Any] | None:
    if hparams is None:
        return None
    try:
        found = json.loads(hparams)
    except ValueError as error:
        raise ConfigError(f"--hparams is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--hparams must be a JSON object such as '{{\"width\": 64}}', not {hparams[:50]!r}")
    return found


def _checkpoint(state: dict[str, Tensor], template: dict[str, Any], arguments: dict[str, Any] | None) -> dict[str, Any]:
    """What ``load_from_checkpoint`` reads. Optimizer states are a node's own and are left out."""
    try:
        lightning = version("lightning")
    except PackageNotFoundError:
        lightning = version("pytorch-lightning")
    checkpoint: dict[str, Any] = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": lightning, "state_dict": state, "loops": {}}
    checkpoint |= {name: template[name] for name in ("hyper_parameters", "hparams_name") if name in template}
    if arguments is not None:
        checkpoint |= {"hyper_parameters": arguments, "hparams_name": "kwargs"}
    return checkpoint


def _save_safetensors(state: dict[str, Tensor], out: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, out, metadata=metadata)


def _save_pickle(value: dict[str, Any], out: Path) -> None:
    import torch

    torch.save(value, out)
