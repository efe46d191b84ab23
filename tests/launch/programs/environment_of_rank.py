"""Write the environment of this process to the result file of a measurement: ``python -m environment_of_rank FOLDER
SETTINGS``."""

import json
import os
import sys
from pathlib import Path

(Path(sys.argv[1]) / "result.json").write_text(json.dumps(dict(os.environ)))
