// The builder of JupyterLab merges this into its own configuration (package.json: webpackConfig).
module.exports = {
  optimization: {
    // The usual ids are hashes of names, and the name of the entry module contains the path of the
    // checkout: another checkout would build other files from the same sources.
    moduleIds: 'natural'
  }
};
