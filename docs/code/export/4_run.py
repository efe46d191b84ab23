import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
x = np.array([[0.1, 2.0, -1.0, 0.5], [1.5, 0.0, 0.2, 3.0]], dtype=np.float32)
(probabilities,) = session.run(None, {"x": x})
print(probabilities.round(2))
