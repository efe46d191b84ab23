mkdir first-model && cd first-model
python3 -m venv .venv
source .venv/bin/activate
