"""``python -m benchmarks seed``: the models of four articles, trained on synthetic data under the settings of the
articles."""
