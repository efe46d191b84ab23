roomier validate --model project.Model --data project.Code --ckpt_path last
