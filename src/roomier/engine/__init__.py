"""From a Plan and a module to something that runs steps: ``build`` and the engines it makes."""
