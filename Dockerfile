# vlrl on Debian 13 (Python 3.13), as an ordinary user:
#   docker build -t vlrl .                                     PyTorch for CUDA, runs on a CPU too
#   docker build -t vlrl --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .     PyTorch for CPUs, much smaller
#   docker build -t vlrl --build-arg EXTRAS=app,vllm .         the extras of docs/install.md
#   docker run --rm -v "$PWD/runs:/vlrl/runs" vlrl train configs/quickstart.yaml
#   docker run --rm --gpus all --shm-size 8g ... vlrl train my.yaml          needs the NVIDIA Container Toolkit
ARG BASE=debian:trixie-slim
FROM ${BASE}

# gcc and Python's headers: Triton compiles its kernels at run time. chromium: tasks web and gui
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3 python3-dev python3-venv gcc git make chromium fonts-dejavu-core && rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --uid 1000 vlrl && install -d -o vlrl /vlrl /vlrl/runs
USER vlrl
WORKDIR /vlrl
ENV PATH=/vlrl/.venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# what changes rarely first, so that a change of the code installs no package again
ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=demo,app,gui,driving,gym,math
COPY --chown=vlrl constraints.txt ./
RUN python3 -m venv .venv && pip install -c constraints.txt --index-url ${TORCH_INDEX} torch torchvision
COPY --chown=vlrl . .
RUN pip install -c constraints.txt -e ".[${EXTRAS}]" && vlrl doctor

ENTRYPOINT ["vlrl"]
CMD ["--help"]
