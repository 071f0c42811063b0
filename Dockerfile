# The recipe with TransformerEngine, for NVIDIA GPUs of the Ampere generation and newer.
#
#   docker build -t vit-recipe .
#   docker run --rm --gpus=all --shm-size=16G -v /data/imagenet:/data:ro -v "$PWD/runs:/workspace/runs" vit-recipe \
#       torchrun --standalone --nproc-per-node 8 train_fsdp2.py --config-name vit_base_patch16_224 data.path=/data
#   docker run --rm --gpus=all --shm-size=16G vit-recipe python tools/doctor.py
#
# --shm-size: loader processes hand batches over in /dev/shm, of which Docker gives 64 MiB otherwise. The user is not root:
# its number is 1000 unless built with --build-arg UID=$(id -u), and mounted folders must be writable for it.

# torch 2.11 with torchvision 0.26, CUDA 13.0 with its compiler and headers, Python 3.12: of the versions that the
# requirements admit, the ones that the GPU measurements of this repository were made with.
FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel

ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

# TransformerEngine takes cuDNN from these paths. The base holds two: the system's, and the one that torch was built with
# and loads; TransformerEngine's import fails if it meets the other one. This link is to torch's.
RUN ln -s "$(python -c 'import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])')" /opt/cudnn
ENV CUDNN_HOME=/opt/cudnn \
    CUDNN_PATH=/opt/cudnn \
    LD_LIBRARY_PATH=/opt/cudnn/lib:${LD_LIBRARY_PATH}

# TransformerEngine's PyTorch part is compiled here against the base's torch: no build isolation, and torch itself stays.
WORKDIR /workspace
COPY requirements.txt requirements-gpu.txt ./
ARG MAX_JOBS=8
RUN python -m pip freeze | grep -E '^(torch|torchvision)==' > /tmp/constraints.txt \
    && NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS} \
       python -m pip install --no-build-isolation -c /tmp/constraints.txt -r requirements-gpu.txt \
    && rm /tmp/constraints.txt

# Ubuntu's own user 1000, where there is one, makes room.
ARG UID=1000
RUN if id "${UID}" > /dev/null 2>&1; then userdel --remove "$(id -un "${UID}")"; fi \
    && useradd --create-home --uid "${UID}" recipe \
    && mkdir runs \
    && chown recipe: . runs

COPY --chown=recipe:recipe . .
USER recipe

# The versions fit, or the build ends here.
RUN python -c "import schema"

CMD ["python", "tools/doctor.py"]
