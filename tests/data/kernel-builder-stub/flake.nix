{
  description = "Stands for kernel-builder where there is no network: its function takes the same arguments";

  outputs =
    { self }:
    {
      lib.genKernelFlakeOutputs =
        {
          self,
          path,
          rev ? null,
          doGetKernelCheck ? true,
          pythonCheckInputs ? (packages: [ ]),
          pythonNativeCheckInputs ? (packages: [ ]),
          torchVersions ? (versions: versions),
        }:
        {
          backends = (builtins.fromTOML (builtins.readFile (path + "/build.toml"))).general.backends;
          checkInputs = pythonCheckInputs { numpy = "numpy"; };
          inherit doGetKernelCheck;
        };
    };
}
