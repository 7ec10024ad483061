"""One node of a run that a YAML describes: ``python examples/cli.py fit --config configs/laptop.yaml``.

The same as ``python -m gradientmail_torch.lightning``, run where the model of these examples can be imported.
"""

from gradientmail_torch.lightning.__main__ import main

if __name__ == "__main__":
    main()
