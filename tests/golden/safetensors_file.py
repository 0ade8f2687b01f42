"""Write weights.safetensors with the safetensors package (0.8.0): python tests/golden/safetensors_file.py."""

from pathlib import Path

import numpy as np

if __name__ == "__main__":
    from safetensors.numpy import save_file  # here alone: the tests read the file without the package

    values = np.arange(12).reshape(3, 4) / 8 - 0.5  # exact in float16
    save_file(
        {
            "fc1.weight": values.astype(np.float32),
            "fc1.bias": np.zeros(3, np.float32),
            "half.weight": values.astype(np.float16),
            "double.weight": values,
            "conv.weight": values.reshape(3, 1, 2, 2).astype(np.float32),
            "steps": np.array(7),
        },
        Path(__file__).with_name("weights.safetensors"),
        metadata={"format": "np"},
    )
