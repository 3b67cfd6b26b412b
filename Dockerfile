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
WORKDIR /home/me
RUN chmod 755 /home/me && python3 -m venv env
ENV PATH=/home/me/env/bin:$PATH
# what is required, without the sources: a layer that a change of them does not build again
COPY --chown=me settings.ini setup.py pyproject.toml constraints.txt LICENSE required/
RUN touch required/README.md \
    && pip install --no-cache-dir -c required/constraints.txt './required[lab,track,deepspeed,prove]'
COPY --chown=me . sft_nb
RUN pip install --no-cache-dir --no-deps --force-reinstall ./sft_nb
WORKDIR /home/me/work
EXPOSE 8888
HEALTHCHECK --interval=1h --timeout=5m --start-period=1m CMD ["sft_nb", "check", "--config", "demo", "--device", "cuda"]
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser"]
