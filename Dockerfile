# sft_nb, the CUDA build of PyTorch and JupyterLab, for a user who is not root.
#
#   docker build -t sft_nb .
#   docker run --gpus all --shm-size 8g -p 127.0.0.1:8888:8888 -v "$PWD:/home/me/work" sft_nb
#   docker run --gpus all --shm-size 8g -v "$PWD:/home/me/work" sft_nb sft_nb train --config demo
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home me
USER me
COPY --chown=me . /home/me/sft_nb
RUN python3 -m venv /home/me/env \
    && /home/me/env/bin/pip install --no-cache-dir -c /home/me/sft_nb/constraints.txt \
       '/home/me/sft_nb[lab,track,deepspeed,prove]' \
    && chmod 755 /home/me
ENV PATH=/home/me/env/bin:$PATH
WORKDIR /home/me/work
EXPOSE 8888
HEALTHCHECK --interval=1h --timeout=5m --start-period=1m CMD ["sft_nb", "check", "--config", "demo", "--device", "cuda"]
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser"]
