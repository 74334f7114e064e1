"""Write a model as a folder that transformers loads: weights, configuration, tokenizer, model card, code."""

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from configure.schema import Model
from hf.card import Source, format_card
from hf.formats import FORMATS
from hf.tokenizer_files import write_json, write_tokenizer
from runtime import RunError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUTER = re.compile(r"\.(router|gate)\.")  # weights of routers, which stay in fp32
REPO_ROOT = Path(__file__).parents[1]
CODE = {  # file in an export of form "nanokern": its source here
    "configuration_nanokern.py": "hf/configuration_nanokern.py",
    "modeling_nanokern.py": "hf/modeling_nanokern.py",
    "attention.py": "attention.py",
    "router.py": "router.py",
    "torch_grouped.py": "kernels/torch_grouped.py",
    "LICENSE-code": "LICENSE",
}


def choose_form(form: str, model: Model, biased: bool = False) -> str:
    """`form`, a key of FORMATS, or for "auto" the first of transformers' own classes that fits, else "nanokern".

    Where selection biases have moved (`biased`) none of those classes fits. Raises ValueError if `form` does not.
    """
    misfits = {name: candidate.find_misfits(model) for name, candidate in FORMATS.items()}
    for name in misfits.keys() - {"nanokern"} if biased else ():
        misfits[name].append("a selection bias (train.bias_update)")
    if form == "auto":
        return next(name for name in FORMATS if not misfits[name])
    if misfits[form]:
        raise ValueError(
            f"--format {form}: the run has {', '.join(misfits[form])}, unlike {FORMATS[form].architecture}; use "
            f"--format nanokern"
        )
    return form


def write_export(source: Source, folder: Path, form: str = "auto", dtype: str = "float32") -> None:
    """Write all files of an export into the empty `folder`; `form` is that of `choose_form`.

    Weights are written in `dtype`, a key of DTYPES, but for the routers', which stay in fp32.

    Raises:
        ValueError: no exported model computes what the model does, or the class that `form` names does not.
        OSError: a file cannot be written.
    """
    model, tokenizer = source.config.model, source.tokenizer
    if source.config.data.document_mask:
        raise RunError(
            f"{source.run}: trained with data.document_mask = true, which no exported model computes: its attention "
            f"would cross documents. Use the run itself (scripts.sample, eval.downstream, eval.val_loss), or train "
            f"with --data.document_mask=false"
        )
    weights = source.model.state_dict()
    biased = any(tensor.any() for name, tensor in weights.items() if name.endswith("selection_bias"))
    form = choose_form(form, model, biased)

    state = {}
    for name, tensor in FORMATS[form].from_own(weights, model).items():
        state[name] = (tensor if ROUTER.search(name) else tensor.to(DTYPES[dtype])).contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})  # transformers requires this key

    config = {
        "architectures": [FORMATS[form].architecture],
        "model_type": form,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }
    ends = {f"{name}_token_id": tokenizer.eot for name in ("bos", "eos", "pad")}
    origin = {"run": source.config.run.name, "weights": source.label}
    config |= FORMATS[form].make_config(model) | ends | {"dtype": dtype, "nanokern": origin}
    write_json(folder / "config.json", config)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes 0600
    padding = list(range(tokenizer.vocab_size, model.vocab_size))
    write_json(folder / "generation_config.json", ends | ({"suppress_tokens": padding} if padding else {}))
    write_tokenizer(tokenizer, folder, model.block_size)
    shutil.copy(source.run / "config.toml", folder)
    if form == "nanokern":
        for name, source_file in CODE.items():
            shutil.copyfile(REPO_ROOT / source_file, folder / name)
    (folder / "README.md").write_text(format_card(source, form, dtype), "utf-8")
