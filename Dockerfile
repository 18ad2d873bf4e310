# docker build -t procgen . && docker run --gpus all -v "$PWD/runs:/work/runs" procgen ppo_procgen.py --env-id bigfish
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libegl1 libopengl0 && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . .
RUN pip install --no-cache-dir -r requirements.txt 'jax[cuda12]'
ENTRYPOINT ["python"]
