roomier export runs --to hugging-face merged
roomier export runs --to hugging-face adapter --adapters alone
ls merged adapter
