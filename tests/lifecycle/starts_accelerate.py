"""A third-party command line: it starts accelerate's launcher on a script, as `trl sft` does."""

import subprocess
import sys

if __name__ == "__main__":
    config, *rest = sys.argv[1:]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, *rest]
    sys.exit(subprocess.run(command, check=False).returncode)
