"""An ordinary notebook that never uses the GPU. Its cells run in order, twice."""

CELLS = [
    # 1
    """\
import json
import logging
import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
""",
    # 2
    """\
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, confusion_matrix
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from tqdm import tqdm
""",
    # 3
    """\
logging.basicConfig(level=logging.INFO)
logger = logging.getLogger("analysis")
logger.info("started at %s", datetime.now())
""",
    # 4
    """\
rng = np.random.default_rng(0)
days = pd.date_range("2026-01-01", periods=200, freq="D")
with open("sales.csv", "w") as file:
    file.write("day,shop,sold,price\\n")
    for day in days:
        shop = rng.choice(["north", "south", "west"])
        file.write(f"{day.date()},{shop},{rng.integers(1, 50)},{rng.normal(10, 2):.2f}\\n")
""",
    # 5
    """\
df = pd.read_csv("sales.csv", parse_dates=["day"])
df.head()
""",
    # 6
    "df.describe(include='all')",
    # 7
    """\
df["revenue"] = df["sold"] * df["price"]
df["weekday"] = df["day"].dt.day_name()
df = df[df["revenue"] > 0].reset_index(drop=True)
df.isna().sum()
""",
    # 8
    """\
by_shop = df.groupby("shop").agg(total=("revenue", "sum"), mean=("price", "mean"))
by_shop.sort_values("total", ascending=False)
""",
    # 9
    """\
fig, ax = plt.subplots(figsize=(4, 3))
ax.plot(df["day"], df["revenue"], label="revenue")
ax.set_title("Revenue")
ax.legend()
plt.show()
""",
    # 10
    """\
fig, axes = plt.subplots(1, 2, figsize=(6, 3))
for ax, column in zip(axes, ["sold", "price"]):
    ax.hist(df[column], bins=20)
    ax.set_xlabel(column)
fig.tight_layout()
fig.savefig("histograms.png")
plt.close(fig)
""",
    # 11
    """\
managers = pd.DataFrame({"shop": ["north", "south"], "manager": ["Ada", "Grace"]})
merged = df.merge(managers, on="shop", how="left")
merged["manager"] = merged["manager"].fillna("nobody")
merged.pivot_table(index="manager", columns="weekday", values="revenue", aggfunc="mean").round(1)
""",
    # 12
    """\
weekly = df.set_index("day")["revenue"].resample("W").sum()
rolling = weekly.rolling(4).mean()
print(weekly.index.max() - timedelta(days=7), rolling.iloc[-1])
""",
    # 13
    """\
X = pd.get_dummies(df[["sold", "price", "shop"]])
y = (df["revenue"] > df["revenue"].median()).astype(int)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=0)
X_train.shape, X_test.shape
""",
    # 14
    """\
model = LogisticRegression(max_iter=1000)
model.fit(X_train, y_train)
print(accuracy_score(y_test, model.predict(X_test)))
""",
    # 15
    """\
model = RandomForestClassifier(n_estimators=20, random_state=0)
model.fit(X_train, y_train)
importances = pd.Series(model.feature_importances_, index=X.columns).sort_values()
importances
""",
    # 16
    """\
pipeline = Pipeline([("scale", StandardScaler()), ("regress", LinearRegression())])
scores = cross_val_score(pipeline, df[["sold", "price"]], df["revenue"], cv=3)
print(f"R2 {scores.mean():.2f} +- {scores.std():.2f}")
""",
    # 17
    """\
search = GridSearchCV(
    make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)),
    {"logisticregression__C": [0.1, 1.0]},
    cv=3,
)
search.fit(X_train, y_train)
search.best_params_
""",
    # 18
    """\
predicted = search.predict(X_test)
matrix = confusion_matrix(y_test, predicted)
fig, ax = plt.subplots()
ax.imshow(matrix)
for (i, j), value in np.ndenumerate(matrix):
    ax.text(j, i, str(value), ha="center")
plt.show()
""",
    # 19
    """\
pca = PCA(n_components=2)
points = pca.fit_transform(StandardScaler().fit_transform(X))
labels = KMeans(n_clusters=3, n_init=2, random_state=0).fit_predict(points)
plt.scatter(points[:, 0], points[:, 1], c=labels)
plt.show()
""",
    # 20
    """\
@dataclass
class Shop:
    name: str
    revenue: float

    def share(self, total):
        return self.revenue / total

shops = [Shop(name, row.total) for name, row in by_shop.iterrows()]
total = sum(shop.revenue for shop in shops)
{shop.name: round(shop.share(total), 2) for shop in shops}
""",
    # 21
    """\
words = Counter()
for text in tqdm(["The quick brown fox", "the lazy dog", "a quick dog"]):
    words.update(re.findall(r"[a-z]+", text.lower()))
words.most_common(3)
""",
    # 22
    """\
t_value, p_value = stats.ttest_ind(df.loc[df["shop"] == "north", "price"],
                                   df.loc[df["shop"] == "south", "price"])
logger.info("p = %.3f", p_value)
result = {"t": float(t_value), "p": float(p_value), "at": datetime.now().isoformat()}
""",
    # 23
    """\
out = Path("results")
out.mkdir(exist_ok=True)
(out / "result.json").write_text(json.dumps(result, indent=2))
with open(out / "result.json") as file:
    print(json.load(file)["p"])
df.to_csv(out / "clean.csv", index=False)
df.to_parquet(out / "clean.parquet")
sorted(path.name for path in out.glob("*"))
""",
    # 24
    """\
def bootstrap(values, n=50, rng=rng):
    means = [rng.choice(values, size=len(values)).mean() for _ in range(n)]
    return np.percentile(means, [5, 95])

bar = tqdm(total=2)
low, high = bootstrap(df["price"].to_numpy())
bar.update(2)
bar.close()
assert low < high
""",
    # 25
    """\
again = pd.read_parquet("results/clean.parquet")
encoder = OneHotEncoder()
encoded = encoder.fit_transform(again[["shop", "weekday"]])
np.save("encoded.npy", encoded.toarray())
again.query("sold > 10").assign(log=lambda d: np.log(d["revenue"])).sample(3, random_state=1)
""",
]
