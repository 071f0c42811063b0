# The recipe with TransformerEngine, for NVIDIA GPUs of the Ampere generation and newer.
#
#   docker build -t vit-recipe .
#   docker run --rm --gpus=all --shm-size=16G -v /data/imagenet:/data:ro -v "$PWD/runs:/workspace/runs" vit-recipe \
#       torchrun --standalone --nproc-per-node 8 train_fsdp2.py --config-name vit_base_patch16_224 data.path=/data
#   docker run --rm --gpus=all --shm-size=16G vit-recipe python3 tools/doctor.py
#
# --shm-size: loader processes hand batches over in /dev/shm, of which Docker gives 64 MiB otherwise. The user is not root:
# its number is 1000 unless built with --build-arg UID=$(id -u), and mounted folders must be writable for it.

# torch 2.11 with torchvision 0.26, CUDA 13.0 with its compiler and headers, Python 3.12: of the versions that the
# requirements admit, the ones that the GPU measurements of this repository were made with.
FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

# What compiles TransformerEngine's PyTorch part, in the distribution's own versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git ninja-build python3-dev \
    && rm -rf /var/lib/apt/lists/*

# TransformerEngine takes cuDNN from these paths. The base may hold two: the system's, and the one that torch was built with
# and loads; TransformerEngine's import fails if it meets the other one. These links are to torch's, and to torch's NCCL.
RUN for part in cudnn nccl; do \
        ln -s "$(python3 -c "import nvidia.${part} as part; print(list(part.__path__)[0])")" "/opt/${part}" || exit; \
    done
ENV CUDNN_HOME=/opt/cudnn \
    CUDNN_PATH=/opt/cudnn \
    LD_LIBRARY_PATH=/opt/cudnn/lib:${LD_LIBRARY_PATH}

# The base's torch stays as it is. TransformerEngine's PyTorch part is compiled against it, with CUDA's headers from the base
# and cuDNN's and NCCL's from torch's (CPATH: its build has no other way to them, NVIDIA/TransformerEngine#918), hence without
# isolation; a wheel that was built elsewhere is not taken.
WORKDIR /workspace
COPY requirements.txt requirements-gpu.txt ./
ARG MAX_JOBS=8
RUN python3 -m pip freeze | grep -E '^(torch|torchvision)==' > /tmp/constraints.txt \
    && python3 -m pip install -c /tmp/constraints.txt -r requirements.txt \
    && CPATH=/opt/cudnn/include:/opt/nccl/include NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS} \
       python3 -m pip install --no-build-isolation -c /tmp/constraints.txt -r requirements-gpu.txt \
    && rm /tmp/constraints.txt

# Ubuntu's own user 1000, where there is one, makes room.
ARG UID=1000
RUN if id "${UID}" > /dev/null 2>&1; then userdel --remove "$(id -un "${UID}")"; fi \
    && useradd --create-home --uid "${UID}" recipe \
    && mkdir runs \
    && chown recipe: . runs

COPY --chown=recipe:recipe . .
USER ${UID}

# The versions fit, or the build ends here.
RUN python3 -c "import launch"

# What a run's log says of the code: docker build --build-arg COMMIT=$(git describe --always --dirty) ...
ARG COMMIT=
ENV COMMIT=${COMMIT}

CMD ["python3", "tools/doctor.py"]
