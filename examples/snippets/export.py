"""Export a module to TorchScript and ONNX, and compare the outputs."""

import numpy as np
import onnxruntime
import torch
from autoencoder import LitAutoEncoder

autoencoder = LitAutoEncoder().eval()
x = torch.randn(3, 64)

torch.jit.save(autoencoder.to_torchscript(), "model.pt")
scripted = torch.jit.load("model.pt")

autoencoder.to_onnx("model.onnx", x)
session = onnxruntime.InferenceSession("model.onnx")
[of_onnx] = session.run(None, {session.get_inputs()[0].name: x.numpy()})

expected = autoencoder(x).detach().numpy()
print(f"largest difference: {np.abs(of_onnx - expected).max():.1e}")
np.testing.assert_allclose(scripted(x).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(of_onnx, expected, rtol=1e-4, atol=1e-5)
