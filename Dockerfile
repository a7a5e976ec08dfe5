# docker build --build-arg ACCEL=gpu -t minirl-sql .
# docker run --gpus all -v "$PWD/runs:/home/minirl/runs" minirl-sql --accel gpu --cfg progress.yaml
FROM python:3.12-slim

# cpu, gpu (CUDA 13; its libraries come with JAX's wheels, the host gives the driver) or tpu
ARG ACCEL=cpu

RUN useradd --create-home minirl
WORKDIR /opt/minirl-sql
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[${ACCEL}]"

USER minirl
WORKDIR /home/minirl
ENTRYPOINT ["python", "-m", "launch.train"]
