from project import Classifier


class Deployed(Classifier):
    def forward(self, x):
        return self.net(x).softmax(dim=1)
