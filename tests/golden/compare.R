# Golden numbers for fedstat's comparisons, from R's stats, nlme and lme4.
#   Rscript tests/golden/compare.R tests/golden/compare.json
# The data are drawn here and kept with the numbers. "unbalanced" leaves cells out; "singular" has no variance of
# seeds, so that lme4's estimate stands at the boundary.
suppressMessages({library(nlme); library(lme4); library(jsonlite)})
out <- commandArgs(trailingOnly = TRUE)[1]
RNGkind("Mersenne-Twister", "Inversion", "Rejection")

grid <- function(seed, seeds, sd_seed, drop = integer(0)) {
  set.seed(seed)
  d <- expand.grid(method = c("fedavg", "fedfac", "fedper"), heterogeneity = c("low", "high"), seed = seq_len(seeds),
                   stringsAsFactors = FALSE)
  effect <- c(fedavg = 0, fedfac = .05, fedper = .03)
  d$accuracy <- .7 + effect[d$method] - .1 * (d$heterogeneity == "high") +
    .04 * (d$heterogeneity == "high" & d$method == "fedfac") + rnorm(seeds, 0, sd_seed)[d$seed] + rnorm(nrow(d), 0, .01)
  if (length(drop)) d[-drop, ] else d
}

model <- function(d, name) {
  d$method <- factor(d$method, c("fedavg", "fedfac", "fedper"))
  d$heterogeneity <- factor(d$heterogeneity, c("low", "high"))
  tight <- lmeControl(tolerance = 1e-12, msTol = 1e-14, msMaxIter = 1000, maxIter = 1000)
  by_nlme <- lme(accuracy ~ method * heterogeneity, random = ~ 1 | seed, data = d, method = "REML", control = tight)
  by_lme4 <- suppressMessages(lmer(accuracy ~ method * heterogeneity + (1 | seed), d, REML = TRUE))
  t <- summary(by_nlme)$tTable
  list(
    name = name, data = as.list(transform(d, method = as.character(method), heterogeneity = as.character(heterogeneity))),
    estimate = unname(t[, "Value"]), std_error = unname(t[, "Std.Error"]), df = unname(t[, "DF"]),
    statistic = unname(t[, "t-value"]), p_value = unname(t[, "p-value"]),
    group_variance = as.numeric(VarCorr(by_nlme)[1, "Variance"]), residual_variance = by_nlme$sigma^2,
    singular = isSingular(by_lme4), lme4_std_error = unname(coef(summary(by_lme4))[, "Std. Error"]),
    lme4_group_variance = as.numeric(VarCorr(by_lme4)$seed), lme4_residual_variance = sigma(by_lme4)^2
  )
}

test <- function(d) {
  one <- d[d$heterogeneity == "low", ]
  of <- function(m) one$accuracy[one$method == m][order(one$seed[one$method == m])]
  t <- lapply(c(fedfac = "fedfac", fedper = "fedper"), function(m) t.test(of(m), of("fedavg"), paired = TRUE))
  p <- sapply(t, function(x) x$p.value)
  list(
    p_value = p, p_holm = p.adjust(p, "holm"), statistic = sapply(t, function(x) unname(x$statistic)),
    conf = lapply(t, function(x) as.numeric(x$conf.int)),
    bonferroni = lapply(c(fedfac = "fedfac", fedper = "fedper"), function(m)
      as.numeric(t.test(of(m), of("fedavg"), paired = TRUE, conf.level = .975)$conf.int))
  )
}

balanced <- grid(1, 5, .03)
write_json(list(
  versions = list(R = R.version.string, nlme = as.character(packageVersion("nlme")), lme4 = as.character(packageVersion("lme4"))),
  tolerance = 1e-5,
  models = list(model(balanced, "balanced"), model(grid(2, 6, .03, c(3, 10, 20)), "unbalanced"), model(grid(4, 4, 0), "singular")),
  paired = test(balanced)
), out, digits = NA, auto_unbox = TRUE)
