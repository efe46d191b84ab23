from project import Classifier


class Broken(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 3:
            raise ValueError("the sample cannot be decoded")
        return super().training_step(batch, batch_idx)
