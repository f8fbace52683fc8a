"""What a command loads, told by its own process: `python -P -c SCRIPT` with its arguments."""

SCRIPT = """
import sys
from tools.cli import main
sys.argv = ["fermata", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""
