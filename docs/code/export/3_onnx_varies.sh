roomier export runs --to onnx model.onnx --model deployed.Deployed --input 'x=float32[8,4]'
